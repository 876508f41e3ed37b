"""`PagedDecode`: launches the kernels of rows with one query token each."""

from typing import Any

import torch
from torch import Tensor

from penstock.engine.kernels.attention.paged.decode_kernels import _decode, _plan_decode
from penstock.engine.kernels.attention.paged.tiles import (
    ITEM,
    LOG2_E,
    SMALL_HEAD,
    WorkList,
    shape_constants,
)
from penstock.engine.kernels.attention.shape import AttentionShape
from penstock.engine.kernels.kv_codes import pointers
from penstock.engine.kernels.launch import overlapped
from penstock.engine.kernels.sizes import next_power_of_2
from penstock.engine.memory.pool.kv_codes import KVPages
from penstock.engine.step.device_step import Rotation

# Keys in a tile. A tile is within one block if blocks are at least as large.
_TILE = 64
# Programs of a decode that a multiprocessor holds, by shared memory at head size 128.
DECODES_PER_SM = 3
# While there is less than this for each program, all pieces run at once; with more, in several
# rounds, so that little of the device is idle in the last one.
_LONG_PIECE = 512
# Pieces per multiprocessor, of all KV heads, at the most.
_PIECES_PER_SM = 8
# The pieces of a row that are combined at a time; fewer where these would have more numbers.
_COMBINED, _MOST_COMBINED = 8, 8192


class PagedDecode:
    """One query token per row. Owns the work lists and partial results. `plan` once a step, then
    call it for each layer."""

    def __init__(
        self,
        shape: AttentionShape,
        max_rows: int,
        num_sms: int,
        device: torch.device,
        *,
        per_sm: int = DECODES_PER_SM,
    ) -> None:
        """num_sms: multiprocessors of the device. per_sm: programs for each. Allocates some MB."""
        self._shape = shape
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self._num_programs = per_sm * num_sms
        self._at_once = max(1, self._num_programs // kv_heads)
        self._num_pieces = max(1, _PIECES_PER_SM * num_sms // kv_heads)
        max_items = self._num_pieces + max_rows
        self._max_rows = max_rows
        self._device = device
        self._lists: dict[int | None, WorkList] = {}
        self._partial = torch.empty(max_items, heads, dim, dtype=torch.float32, device=device)
        self._lse = torch.empty(max_items, heads, dtype=torch.float32, device=device)
        group_size = next_power_of_2(shape.group)
        combined = _MOST_COMBINED // (group_size * next_power_of_2(dim))
        self._constants = shape_constants(shape) | {
            "GROUP_ROWS": max(16, group_size),
            "GROUP_SIZE": group_size,
            "COMBINED": max(1, min(_COMBINED, combined)),
        }
        # Pieces of each row that have been computed; zeros between two launches.
        self._arrived = torch.zeros(max_rows, kv_heads, dtype=torch.int32, device=device)

    def plan(self, context_lens: Tensor, row_slots: Tensor, window: int | None) -> None:
        """Lists the pieces of rows with these lengths, (B,) int32, this step's token included.

        row_slots: (B,) int32. Call it once a step for each window that the model's layers have. A
        row of length 0 is skipped: nothing is written for it.
        """
        num_rows = len(context_lens)
        assert num_rows <= self._max_rows, (num_rows, self._max_rows)
        if window not in self._lists:  # in a graph, every replay would fill it with zeros
            self._lists[window] = self._empty_list()
        work = self._lists[window]
        _plan_decode[(1,)](
            context_lens, row_slots, work.items, work.first_item, num_rows, window or 0,
            self._num_pieces, self._at_once,
            LONG=_LONG_PIECE, TILE=_TILE, ROWS=next_power_of_2(self._max_rows), num_warps=4,
            **overlapped(),
        )  # fmt: skip

    def __call__(
        self,
        query: Tensor,
        keys: KVPages,
        values: KVPages,
        block_tables: Tensor,
        window: int | None,
        out: Tensor,
        rotation: Rotation | None = None,
        kv_slots: Tensor | None = None,
        *,
        sinks: Tensor | None = None,
    ) -> None:
        """Writes out, (B, num_heads, head_dim), of the rows that were planned.

        query: like out. keys, values: one layer of the pool. block_tables: (num_slots, max_blocks)
        int32. rotation: if given, query is the projection instead, (B, (num_heads + kv_parts *
        num_kv_heads) * head_dim), and its keys and values are written to kv_slots, (B,) int64.
        sinks: see `Attention`.
        """
        shape, work, num_rows = self._shape, self._lists[window], len(out)
        (key_codes, key_scales), (value_codes, value_scales) = pointers(keys), pointers(values)
        is_wide = query.dtype is torch.float32 and shape.head_dim > SMALL_HEAD
        most = (self._num_pieces + num_rows) * shape.num_kv_heads
        _decode[(min(self._num_programs, most),)](
            query, key_codes, value_codes, key_scales, value_scales, block_tables, work.items,
            work.first_item, out, self._partial, self._lse, self._arrived, sinks, num_rows,
            block_tables.stride(0), window or 0, shape.head_dim**-0.5 * LOG2_E,
            **self._constants, **_rotation_arguments(rotation, kv_slots, shape.head_dim),
            **_options(shape, is_wide=is_wide, is_coded=key_scales is not None), **overlapped(),
        )  # fmt: skip

    def work_list(self, window: int | None) -> WorkList:
        """The pieces that the last `plan` with this window listed."""
        return self._lists[window]

    def _empty_list(self) -> WorkList:
        max_items = self._num_pieces + self._max_rows
        return WorkList(
            torch.zeros(max_items, ITEM, dtype=torch.int32, device=self._device),
            torch.zeros(self._max_rows + 1, dtype=torch.int32, device=self._device),
        )


def _rotation_arguments(
    rotation: Rotation | None, kv_slots: Tensor | None, head_dim: int
) -> dict[str, Any]:
    if rotation is None:
        tensors = ("kv_slots", "cos", "sin", "query_norm", "key_norm", "query_factors")
        sizes = {"angles_stride": 0, "ROTARY_DIM": head_dim, "KV_PARTS": 2}
        return (
            dict.fromkeys(tensors) | sizes | {"eps": 0.0, "ROTATES": False, "NORMS_VALUES": False}
        )
    return {
        "kv_slots": kv_slots,
        "cos": rotation.cos,
        "sin": rotation.sin,
        "query_norm": rotation.query_norm,
        "key_norm": rotation.key_norm,
        "query_factors": rotation.query_factors,
        "eps": rotation.eps,
        "angles_stride": rotation.cos.stride(0),
        "ROTATES": True,
        "ROTARY_DIM": rotation.rotary_dim or head_dim,
        "KV_PARTS": rotation.kv_parts,
        "NORMS_VALUES": rotation.norms_values,
    }


def _options(shape: AttentionShape, *, is_wide: bool, is_coded: bool) -> dict[str, int | None]:
    """TILE: keys in a tile. In float32, two tiles of 64 would not fit, and their products would
    spill registers; so would the numbers that codes are converted to, and heads of 512 dimensions.
    """
    is_large = is_wide or shape.head_dim > 128
    return {
        "TILE": _TILE >> (is_wide or is_coded) >> (shape.head_dim > 256),
        "num_warps": 4,
        # The block table's indirection takes half of the stages: with five, two tiles are in
        # flight, 64 KiB of them at head size 128, and three programs fit a multiprocessor. Of codes
        # twice as many, of a quarter of the size each.
        "num_stages": 3 if is_large else 9 if is_coded else 5,
        # Three programs have so many each. Some compilers take more, for the rotation.
        "maxnreg": None if is_large else 168,
    }
