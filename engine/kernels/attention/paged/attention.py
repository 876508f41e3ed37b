"""`PagedAttention`: decodes first, then chunks."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.kernels.attention.flash_prefill import FlashPrefill
from penstock.engine.kernels.attention.paged.decode import DECODES_PER_SM, PagedDecode
from penstock.engine.kernels.attention.paged.prefill import PagedPrefill
from penstock.engine.kernels.attention.protocol import LayerContext
from penstock.engine.kernels.attention.shape import AttentionShape
from penstock.engine.memory.pool.kv_codes import KVPages
from penstock.engine.step.device_step import DeviceStep, DraftSizes, Rotation


@dataclass(frozen=True, slots=True)
class _Kind:
    """The layers whose heads are alike. windows: those that they have. flash: for chunks."""

    windows: Collection[int | None]
    decode: PagedDecode
    prefill: PagedPrefill
    flash: FlashPrefill | None


class PagedAttention:
    """`DeviceAttention` by the kernels of this package: decodes first, then chunks.

    Layers whose heads differ have work lists of their own, as the size of a piece depends on the
    heads.
    """

    is_capturable = True
    takes_decode_lens = True

    def __init__(
        self,
        windows: Mapping[AttentionShape, Collection[int | None]],
        max_rows: int,
        max_tokens: int,
        num_sms: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        decodes_per_sm: int = DECODES_PER_SM,
        flash: FlashPrefill | None = None,
        drafted: DraftSizes | None = None,
    ) -> None:
        """windows: all that the model's layers have, by the shape of these. max_rows, max_tokens:
        of one step. dtype: of queries; keys and values have it too, or are codes. flash: for
        chunks in layers that it fits. drafted: None where no row has drafts."""
        self._flash = flash
        self._kinds = {
            (shape.num_kv_heads, shape.head_dim): _Kind(
                each,
                PagedDecode(
                    shape, max_rows, num_sms, device, per_sm=decodes_per_sm, drafted=drafted
                ),
                PagedPrefill(shape, max_rows, max_tokens, num_sms, device, dtype),
                flash if shape.is_flash else None,
            )
            for shape, each in windows.items()
        }

    def plan(self, step: DeviceStep) -> None:
        if self._flash is not None and self._flash.takes(step):
            self._flash.plan(step)
        if step.group:
            return  # lengths are those of the first group, and tables are read by each layer
        for kind in self._kinds.values():
            if step.num_decodes:
                slots = step.slots[: step.num_decodes]
                for window in kind.windows:
                    kind.decode.plan(step.lens_of_decodes, slots, window, step.queries)
            if step.chunk_starts is not None:
                kind.prefill.plan(step.chunk_starts)

    def __call__(self, query: Tensor, layer: LayerContext, step: DeviceStep, out: Tensor) -> None:
        num, first, tables = step.num_decodes, step.first_chunk, step.block_tables
        slots, lens, kind = step.slots[first:], step.context_lens[first:], self._kind(layer.keys)
        if step.queries is not None:
            kind.decode(query, layer, tables, out, most_queries=step.queries.most)
        elif num:
            kind.decode(query[:num], layer, tables, out[:num])
        if kind.flash is not None and kind.flash.takes(step):
            kind.flash(query[first:], layer, step, out[first:])
        elif (starts := step.chunk_starts) is not None:
            reaches = step.reaches[first:] if layer.has_spans and step.reaches is not None else None
            kind.prefill(query[first:], layer, tables, slots, starts, lens, out[first:], reaches)

    def rotated(
        self,
        projected: Tensor,
        rotation: Rotation,
        layer: LayerContext,
        step: DeviceStep,
        out: Tensor,
    ) -> None:
        """See `RotatingAttention`."""
        decode = self._kind(layer.keys).decode
        decode(
            projected, layer, step.block_tables, out, rotation, step.kv_slots,
            rotary_positions=step.rotary_positions,
        )  # fmt: skip

    def _kind(self, keys: KVPages) -> _Kind:
        return self._kinds[keys.shape[2], keys.shape[3]]
