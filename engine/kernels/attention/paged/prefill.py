"""`PagedPrefill`: prompt chunks, and their kernels."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.attention.paged.tiles import (
    LOG2_E,
    SMALL_HEAD,
    WorkList,
    attend,
    shape_constants,
    sink_scores,
)
from penstock.engine.kernels.attention.protocol import LayerContext
from penstock.engine.kernels.attention.shape import AttentionShape
from penstock.engine.kernels.kv_codes import pointers
from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import next_power_of_2

# Programs of a graph's prefill for each multiprocessor, which holds one at head size 128.
_PREFILLS_PER_SM = 1


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """rows: of queries, tokens times heads. keys: in a tile. The others are launch options."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, head_dim: int, dtype: torch.dtype) -> "PrefillTile":
        """The largest that spills almost no registers and fits every GPU from sm_80 on.

        According to Triton's compiler. The largest tile spills some 100 bytes on sm_80, 89 and 120.
        """
        if dtype is torch.float32 and head_dim > SMALL_HEAD:  # exact, so without matrix units
            if head_dim > 256:
                return cls(rows=16, keys=16, num_warps=8, num_stages=1)
            return cls(rows=16, keys=32, num_warps=8, num_stages=2)
        if head_dim > 256:
            return cls(rows=64, keys=16, num_warps=8, num_stages=2)
        if head_dim > 128:
            return cls(rows=64, keys=32, num_warps=8, num_stages=2)
        return cls(rows=128, keys=64, num_warps=8 if head_dim > 64 else 4, num_stages=3)


class PagedPrefill:
    """Prompt chunks: each token attends to those before it in its sequence."""

    def __init__(
        self,
        shape: AttentionShape,
        max_rows: int,
        max_tokens: int,
        num_sms: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """num_sms: multiprocessors of the device. dtype: of queries."""
        self._least_programs = _PREFILLS_PER_SM * num_sms
        self._tile = PrefillTile.of(shape.head_dim, dtype)
        self._constants = shape_constants(shape)
        self._group = shape.num_heads // self._constants["NUM_KV_HEADS"]
        self._tokens_per_tile = max(1, self._tile.rows // self._group)
        self._max_rows = max_rows
        max_items = -(-max_tokens // self._tokens_per_tile) + max_rows
        self._work = WorkList.empty(max_items, max_rows, device)

    def plan(self, query_starts: Tensor) -> None:
        """Lists the tiles of rows with the tokens between these offsets, (R + 1,) int32."""
        num_rows = len(query_starts) - 1
        assert num_rows <= self._max_rows, (num_rows, self._max_rows)
        _plan_prefill[(1,)](
            query_starts, self._work.items, self._work.first_item, num_rows,
            TOKENS=self._tokens_per_tile, ROWS=next_power_of_2(self._max_rows), num_warps=4,
            **overlapped(),
        )  # fmt: skip

    def __call__(
        self,
        query: Tensor,
        layer: LayerContext,
        block_tables: Tensor,
        row_slots: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        out: Tensor,
        reaches: Tensor | None = None,
    ) -> None:
        """Writes out, (T, num_heads, value_dim), of the tokens of the rows that were planned.

        query: (T, num_heads, head_dim); row i has its tokens [query_starts[i], query_starts[i +
        1]), the last of which is at position context_lens[i] - 1. reaches: (T,) int32, as of
        `ModelInput`. The rest is as for `PagedDecode`.
        """
        num_rows, kv_heads = len(context_lens), self._constants["NUM_KV_HEADS"]
        tile, pages = self._tile, pointers(layer.keys, layer.values)
        # Each row may have a tile more than its share. Programs take them in turn: started for
        # each row of a graph, most would find nothing.
        full = -(-len(query) // self._tokens_per_tile)
        most, least = (full + num_rows) * kv_heads, full * kv_heads
        _prefill[(min(most, max(least, self._least_programs)),)](
            query, *pages, block_tables, row_slots, query_starts, context_lens,
            self._work.items, self._work.first_item, out, layer.sinks, reaches, num_rows,
            block_tables.stride(0), layer.window or 0, query.shape[2] ** -0.5 * LOG2_E,
            **self._constants, TOKENS=self._tokens_per_tile,
            QUERY_ROWS=max(16, next_power_of_2(self._tokens_per_tile * self._group)),
            TILE=tile.keys, num_warps=tile.num_warps, num_stages=tile.num_stages, **overlapped(),
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["query_starts"])
def _plan_prefill(
    query_starts, items, first_item, num_rows,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: tiles of TOKENS query tokens each; the last of a row may be shorter."""
    wait_for_kernels_before(PDL)
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    start = tl.load(query_starts + row, mask=is_row, other=0)
    length = tl.load(query_starts + row + 1, mask=is_row, other=0) - start
    count = tl.cdiv(length, TOKENS)
    first = tl.cumsum(count) - count
    tl.store(first_item + row, first, mask=is_row)
    tl.store(first_item + num_rows, tl.sum(count))
    for index in range(0, tl.max(count)):
        has = is_row & (index < count)
        item = items + (first + index) * 8
        tl.store(item, row, mask=has)
        tl.store(item + 1, index * TOKENS, mask=has)
        tl.store(item + 2, tl.minimum((index + 1) * TOKENS, length), mask=has)


@triton.jit
def _tile(item, query_starts, context_lens):
    """A tile's row, and its tokens in the chunk; where the chunk begins in the step, and at which
    position of its sequence."""
    row = tl.load(item)
    first_token = tl.load(item + 1)
    end_token = tl.load(item + 2)
    start_of_row = tl.load(query_starts + row)
    context_len = tl.load(context_lens + row)
    first_position = context_len - (tl.load(query_starts + row + 1) - start_of_row)
    return row, first_token, end_token, start_of_row, first_position


@triton.jit(
    do_not_specialize=["num_rows", "table_stride", "window"],
    # Slices of a step's tensors, see `_gather_chunks`.
    do_not_specialize_on_alignment=["row_slots", "query_starts", "context_lens", "reaches"],
)
def _prefill(
    query, keys, values, key_scales, value_scales, block_tables, row_slots, query_starts,
    context_lens, items, first_item, out, sinks, reaches, num_rows, table_stride, window, scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    REST: tl.constexpr, REST_DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    QUERY_ROWS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tiles of some query tokens of one sequence, for all query heads of one KV head each."""
    wait_for_kernels_before(PDL)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    member = tl.arange(0, QUERY_ROWS)
    dim = tl.arange(0, DIMS)
    num_items = tl.load(first_item + num_rows)
    for work in range(tl.program_id(0), num_items * NUM_KV_HEADS, tl.num_programs(0)):
        kv_head = work % NUM_KV_HEADS
        # The last tiles of a chunk have the most keys: they start first, so that none runs alone
        # at the end.
        item = num_items - 1 - work // NUM_KV_HEADS
        row, first_token, end_token, start_of_row, first_position = _tile(
            items + item * 8, query_starts, context_lens
        )
        table = block_tables + tl.load(row_slots + row).to(tl.int64) * table_stride

        token = first_token + member // GROUP
        is_query = (member < TOKENS * GROUP) & (token < end_token)
        head = kv_head * GROUP + member % GROUP
        place = ((start_of_row + token).to(tl.int64) * NUM_HEADS + head)[:, None]
        is_there = is_query[:, None] & (dim < HEAD_DIM)[None, :]
        source = query + place * (HEAD_DIM + REST)
        q = tl.load(source + dim[None, :], mask=is_there, other=0.0)
        q_rest = None
        if REST > 0:
            rest = tl.arange(0, REST_DIMS)
            is_rest = is_query[:, None] & (rest < REST)[None, :]
            q_rest = tl.load(source + HEAD_DIM + rest[None, :], mask=is_rest, other=0.0)
        # Padding queries take the last one's position, so that they attend to some key.
        own_token = tl.minimum(token, end_token - 1)
        query_position = first_position + own_token
        last_seen = query_position

        acc = tl.zeros((QUERY_ROWS, DIMS), tl.float32)
        peak = tl.full((QUERY_ROWS,), -1.0e30, tl.float32)
        total = tl.zeros((QUERY_ROWS,), tl.float32)
        if sinks is not None:
            peak = sink_scores(sinks, head, is_query)
            total += 1.0
        end = first_position + end_token
        if reaches is not None:
            last_seen = tl.load(reaches + start_of_row + own_token) - 1
            end = tl.max(last_seen) + 1
        begin = 0
        # Below this, every token of the tile attends to every key.
        all_seen = (first_position + first_token + 1) // TILE * TILE
        if window > 0:
            begin = tl.maximum(first_position + first_token + 1 - window, 0) // TILE * TILE
            all_seen = begin
        for start in range(begin, all_seen, TILE):
            acc, peak, total = attend(
                q, q_rest, query_position, last_seen, table, keys, values, key_scales,
                value_scales, start, end, window, scale, kv_head, acc, peak, total, False,
                NUM_KV_HEADS, HEAD_DIM, DIMS, REST, REST_DIMS, BLOCK_SIZE, TILE,
            )  # fmt: skip
        for start in range(all_seen, end, TILE):
            acc, peak, total = attend(
                q, q_rest, query_position, last_seen, table, keys, values, key_scales,
                value_scales, start, end, window, scale, kv_head, acc, peak, total, True,
                NUM_KV_HEADS, HEAD_DIM, DIMS, REST, REST_DIMS, BLOCK_SIZE, TILE,
            )  # fmt: skip
        mixed = acc / total[:, None]
        target = out + place * HEAD_DIM + dim[None, :]
        tl.store(target, mixed.to(out.dtype.element_ty), mask=is_there)
