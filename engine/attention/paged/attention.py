"""`PagedAttention`: decodes first, then chunks."""

from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.engine.attention.paged.decode import DECODES_PER_SM, PagedDecode
from penstock.engine.attention.paged.prefill import PagedPrefill
from penstock.engine.attention.shape import AttentionShape
from penstock.engine.device_step import DeviceStep, Rotation
from penstock.engine.memory.kv_codes import KVPages


class PagedAttention:
    """`DeviceAttention` by the kernels of this package: decodes first, then chunks."""

    is_capturable = True
    takes_decode_lens = True

    def __init__(
        self,
        shape: AttentionShape,
        windows: Iterable[int | None],
        max_rows: int,
        max_tokens: int,
        num_sms: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        decodes_per_sm: int = DECODES_PER_SM,
    ) -> None:
        """windows: all that the model's layers have. max_rows, max_tokens: of one step. dtype: of
        queries; keys and values have it too, or are codes."""
        self._windows = set(windows)
        self._decode = PagedDecode(shape, max_rows, num_sms, device, per_sm=decodes_per_sm)
        self._prefill = PagedPrefill(shape, max_rows, max_tokens, num_sms, device, dtype)

    def plan(self, step: DeviceStep) -> None:
        if step.group:
            return  # lengths are those of the first group, and tables are read by each layer
        if step.num_decodes:
            for window in self._windows:
                self._decode.plan(step.lens_of_decodes, step.slots[: step.num_decodes], window)
        if step.chunk_starts is not None:
            self._prefill.plan(step.chunk_starts)

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
        num, first, tables = step.num_decodes, step.first_chunk, step.block_tables
        slots, lens = step.slots, step.context_lens
        if num:
            self._decode(query[:num], keys, values, tables, window, out[:num], sinks=sinks)
        if step.chunk_starts is not None:
            self._prefill(
                query[first:],
                keys,
                values,
                tables,
                slots[first:],
                step.chunk_starts,
                lens[first:],
                window,
                out[first:],
                sinks,
            )

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
        """See `RotatingAttention`."""
        tables, kv_slots = step.block_tables, step.kv_slots
        self._decode(projected, keys, values, tables, window, out, rotation, kv_slots, sinks=sinks)
