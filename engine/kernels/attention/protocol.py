"""The protocols of attention over the paged KV pool: with lengths on the host or the device."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from penstock.engine.memory.pool.kv_codes import KVPages
from penstock.engine.step.device_step import DeviceStep, Rotation
from penstock.engine.step.model_input import ModelInput


class Attention(Protocol):
    def __call__(
        self,
        query: Tensor,
        keys: KVPages,
        values: KVPages,
        step: ModelInput,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of each token to its own sequence: (T, num_heads, head_dim).

        query: (T, num_heads, head_dim). keys, values: one layer of the pool, (num_blocks,
        block_size, num_kv_heads, head_dim), this step's tokens already written. window: how many
        positions a token attends to, its own included, or None for all. sinks: (num_heads,)
        float32, a score of each head that takes its share of the softmax and has no value.
        """
        ...


class DeviceAttention(Protocol):
    """An attention backend for GPUs: `plan` once a step for each group of layers, the first one
    first, then one call per layer."""

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can capture it: it never waits for the device."""
        ...

    @property
    def takes_decode_lens(self) -> bool:
        """Whether it supports `DeviceStep.decode_lens`."""
        ...

    def plan(self, step: DeviceStep) -> None: ...

    def __call__(
        self,
        query: Tensor,
        keys: KVPages,
        values: KVPages,
        step: DeviceStep,
        window: int | None,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """Writes out (T, num_heads, head_dim). keys, values: one layer of the pool, this step's
        tokens already written. sinks: as in `Attention`."""
        ...


@runtime_checkable
class RotatingAttention(DeviceAttention, Protocol):
    """A backend that rotates queries and keys itself in a step of decodes alone, and stores the new
    keys and values, without a launch for it."""

    def rotated(
        self,
        projected: Tensor,
        rotation: Rotation,
        keys: KVPages,
        values: KVPages,
        step: DeviceStep,
        window: int | None,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """projected: (T, (num_heads + kv_parts * num_kv_heads) * head_dim), see `Rotation`. Writes
        the step's tokens to keys and values; the rest is as for a call."""
        ...
