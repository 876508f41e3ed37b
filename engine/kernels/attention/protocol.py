"""The protocols of attention over the paged KV pool on a GPU, with lengths on the device."""

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from penstock.engine.memory.pool.kv_codes import KVPages
from penstock.engine.step.device_step import DeviceStep, Rotation


class LayerContext(NamedTuple):
    """All that the tokens of a step attend to in one layer, on a GPU.

    keys, values: the layer's part of the pool, this step's tokens already written. window, sinks:
    as in `gathered_attention`. has_spans: whether it reads `DeviceStep.reaches`.
    """

    keys: KVPages
    values: KVPages
    window: int | None
    sinks: Tensor | None = None
    has_spans: bool = False


class DeviceAttention(Protocol):
    """An attention backend for GPUs: `plan` once a step for each group of layers, the first one
    first, then one call per layer.

    is_capturable: whether a CUDA graph can capture it, as it never waits for the device.
    takes_decode_lens: whether it supports `DeviceStep.decode_lens`.
    """

    is_capturable: bool
    takes_decode_lens: bool

    def plan(self, step: DeviceStep) -> None: ...

    def __call__(self, query: Tensor, layer: LayerContext, step: DeviceStep, out: Tensor) -> None:
        """query, out: (T, num_heads, head_dim), of which out is written."""
        ...


@runtime_checkable
class RotatingAttention(DeviceAttention, Protocol):
    """A backend that rotates queries and keys itself in a step of decodes alone, and stores the new
    keys and values, without a launch for it."""

    def rotated(
        self,
        projected: Tensor,
        rotation: Rotation,
        layer: LayerContext,
        step: DeviceStep,
        out: Tensor,
    ) -> None:
        """projected: (T, (num_heads + kv_parts * num_kv_heads) * head_dim), see `Rotation`. Writes
        the step's tokens to the layer's keys and values, and out as a call does."""
        ...
