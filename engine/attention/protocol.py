"""The two protocols of attention over the paged KV pool: with lengths on the host, and without."""

from typing import Protocol

from torch import Tensor

from penstock.engine.device_step import DeviceStep
from penstock.engine.model_input import ModelInput


class Attention(Protocol):
    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, step: ModelInput, window: int | None
    ) -> Tensor:
        """Causal attention of each token to its own sequence: (T, num_heads, head_dim).

        query: (T, num_heads, head_dim). keys, values: one layer of the pool, (num_blocks,
        block_size, num_kv_heads, head_dim), this step's tokens already written. window: how many
        positions a token sees, itself included, or None for all.
        """
        ...


class DeviceAttention(Protocol):
    """An attention backend of the GPU: `plan` once a step, then a call for every layer."""

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph may hold it: it never waits for the device."""
        ...

    @property
    def takes_decode_lens(self) -> bool:
        """Whether it computes a step with `DeviceStep.decode_lens`."""
        ...

    def plan(self, step: DeviceStep) -> None: ...

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        step: DeviceStep,
        window: int | None,
        out: Tensor,
    ) -> None:
        """Writes out (T, num_heads, head_dim). keys, values: one layer, this step's written."""
        ...
