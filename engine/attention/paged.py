"""Attention that reads keys and values in place in the paged pool, in Triton.

Decode is bound by reading the context, so every multiprocessor has to read all the time. Rows are
split into pieces of about equal length (split-KV), however different their lengths; the pieces are
listed on the device once a step, and all layers share the list. So a captured CUDA graph is valid
for any lengths. As many programs as the device holds take the pieces in turn, so none starts in
vain. The one that finishes a row's last piece combines them by their log-sum-exps, always in the
row's order. In a step of decodes alone, the same kernel rotates queries and keys, and stores the
new keys and values: one launch a layer.

Prefill is bound by arithmetic: each tile has some query tokens of one sequence, with all the query
heads of one KV head, and loops over the keys that they attend to.

Sources: flash attention, Dao et al. 2022 (arXiv:2205.14135); split-KV decode, "Flash-Decoding",
Dao et al. 2023; one work list for rows of different lengths, FlashInfer, Ye et al. 2025
(arXiv:2501.01005). All KV heads of a piece run next to each other, because they read the same cache
lines.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.attention.shape import AttentionShape
from penstock.engine.device_step import DeviceStep, Rotation
from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import next_power_of_2

# Keys in a tile. A tile is within one block if blocks are at least as large.
_TILE = 64
# Programs of a decode that a multiprocessor holds, by shared memory at head size 128.
DECODES_PER_SM = 3
# While there is less than this for each program, all pieces run at once; with more, in several
# rounds, so that little of the device is idle in the last one.
_LONG_PIECE = 512
# Pieces per multiprocessor, of all KV heads, at the most.
_PIECES_PER_SM = 8
# The pieces of a row that are combined at a time.
_COMBINED = 8
# Programs of a graph's prefill for each multiprocessor, which holds one at head size 128.
_PREFILLS_PER_SM = 1
# Only test models have such small heads: in the interpreter, many small tiles are slow.
_SMALL_HEAD = 16
# Fields of a work item of a decode: row, begin, end, how many pieces its row has, the first of
# them, the row's slot and context. Of a prefill: row, begin, end. In a sector of the cache each.
_ITEM = 8


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
        if dtype is torch.float32 and head_dim > _SMALL_HEAD:  # exact, so without matrix units
            return cls(rows=16, keys=32, num_warps=8, num_stages=2)
        if head_dim > 128:
            return cls(rows=64, keys=32, num_warps=8, num_stages=2)
        return cls(rows=128, keys=64, num_warps=8 if head_dim > 64 else 4, num_stages=3)


@dataclass(frozen=True, slots=True)
class WorkList:
    """The pieces that a step's attention consists of, on the device.

    items: (max_items, 8) int32, see `_ITEM`. first_item: (max_rows + 1,) int32, where each row's
    items begin; the last entry is their number.
    """

    items: Tensor
    first_item: Tensor


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
            context_lens,
            row_slots,
            work.items,
            work.first_item,
            num_rows,
            window or 0,
            self._num_pieces,
            self._at_once,
            LONG=_LONG_PIECE,
            TILE=_TILE,
            ROWS=next_power_of_2(self._max_rows),
            num_warps=4,
            **overlapped(),
        )

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        block_tables: Tensor,
        window: int | None,
        out: Tensor,
        rotation: Rotation | None = None,
        kv_slots: Tensor | None = None,
    ) -> None:
        """Writes out, (B, num_heads, head_dim), of the rows that were planned.

        query: like out. keys, values: one layer of the pool. block_tables: (num_slots, max_blocks)
        int32. rotation: if given, query is the projection instead, (B, (num_heads + 2 *
        num_kv_heads) * head_dim), and its keys and values are written to kv_slots, (B,) int64.
        """
        shape, work, num_rows = self._shape, self._lists[window], len(out)
        is_wide = keys.dtype is torch.float32 and shape.head_dim > _SMALL_HEAD
        most = (self._num_pieces + num_rows) * shape.num_kv_heads
        has_norm = rotation is not None and rotation.query_norm is not None
        _decode[(min(self._num_programs, most),)](
            query,
            keys,
            values,
            block_tables,
            work.items,
            work.first_item,
            out,
            self._partial,
            self._lse,
            self._arrived,
            # Unused pointers are any of the same type.
            work.items if kv_slots is None else kv_slots,
            self._lse if rotation is None else rotation.cos,
            self._lse if rotation is None else rotation.sin,
            rotation.query_norm if rotation is not None and has_norm else query,
            rotation.key_norm if rotation is not None and has_norm else query,
            0.0 if rotation is None else rotation.eps,
            num_rows,
            block_tables.stride(0),
            window or 0,
            shape.head_dim**-0.5 * _LOG2_E,
            **_constants(shape),
            ROTATES=rotation is not None,
            HAS_NORM=has_norm,
            GROUP_ROWS=max(16, next_power_of_2(shape.group)),
            GROUP_SIZE=next_power_of_2(shape.group),
            COMBINED=_COMBINED,
            # In float32, two tiles of 64 would not fit, and their products would spill registers.
            TILE=_TILE // 2 if is_wide else _TILE,
            num_warps=4,
            # The block table's indirection takes half of the stages: with five, two tiles are in
            # flight, 64 KiB of them at head size 128, and three programs fit a multiprocessor.
            num_stages=3 if is_wide or shape.head_dim > 128 else 5,
            # What three programs have each. Some compilers take more, for the rotation.
            maxnreg=None if is_wide or shape.head_dim > 128 else 168,
            **overlapped(),
        )

    def work_list(self, window: int | None) -> WorkList:
        """What the last `plan` with this window wrote."""
        return self._lists[window]

    def _empty_list(self) -> WorkList:
        max_items = self._num_pieces + self._max_rows
        return WorkList(
            torch.zeros(max_items, _ITEM, dtype=torch.int32, device=self._device),
            torch.zeros(self._max_rows + 1, dtype=torch.int32, device=self._device),
        )


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
        """num_sms: multiprocessors of the device. dtype: of queries, keys and values."""
        self._shape = shape
        self._least_programs = _PREFILLS_PER_SM * num_sms
        self._tile = PrefillTile.of(shape.head_dim, dtype)
        self._tokens_per_tile = max(1, self._tile.rows // shape.group)
        self._max_rows = max_rows
        max_items = -(-max_tokens // self._tokens_per_tile) + max_rows
        self._work = WorkList(
            torch.zeros(max_items, _ITEM, dtype=torch.int32, device=device),
            torch.zeros(max_rows + 1, dtype=torch.int32, device=device),
        )

    def plan(self, query_starts: Tensor) -> None:
        """Lists the tiles of rows with the tokens between these offsets, (R + 1,) int32."""
        num_rows = len(query_starts) - 1
        assert num_rows <= self._max_rows, (num_rows, self._max_rows)
        _plan_prefill[(1,)](
            query_starts,
            self._work.items,
            self._work.first_item,
            num_rows,
            TOKENS=self._tokens_per_tile,
            ROWS=next_power_of_2(self._max_rows),
            num_warps=4,
            **overlapped(),
        )

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        block_tables: Tensor,
        row_slots: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        window: int | None,
        out: Tensor,
    ) -> None:
        """Writes out, (T, num_heads, head_dim), of the tokens of the rows that were planned.

        query: like out; row i has its tokens [query_starts[i], query_starts[i + 1]), the last of
        which is at position context_lens[i] - 1. The rest is as for `PagedDecode`.
        """
        shape, num_rows = self._shape, len(context_lens)
        tile = self._tile
        # Each row may have a tile more than its share. Programs take them in turn: started for
        # each row of a graph, most would find nothing.
        full = -(-len(query) // self._tokens_per_tile)
        most, least = ((n * shape.num_kv_heads) for n in (full + num_rows, full))
        _prefill[(min(most, max(least, self._least_programs)),)](
            query,
            keys,
            values,
            block_tables,
            row_slots,
            query_starts,
            context_lens,
            self._work.items,
            self._work.first_item,
            out,
            num_rows,
            block_tables.stride(0),
            window or 0,
            shape.head_dim**-0.5 * _LOG2_E,
            **_constants(shape),
            TOKENS=self._tokens_per_tile,
            QUERY_ROWS=max(16, next_power_of_2(self._tokens_per_tile * shape.group)),
            TILE=tile.keys,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **overlapped(),
        )


class PagedAttention:
    """`DeviceAttention` by the kernels below: decodes first, then chunks."""

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
        queries, keys and values."""
        self._windows = set(windows)
        self._decode = PagedDecode(shape, max_rows, num_sms, device, per_sm=decodes_per_sm)
        self._prefill = PagedPrefill(shape, max_rows, max_tokens, num_sms, device, dtype)

    def plan(self, step: DeviceStep) -> None:
        if step.num_decodes:
            for window in self._windows:
                self._decode.plan(_decode_lens(step), step.slots[: step.num_decodes], window)
        if step.chunk_starts is not None:
            self._prefill.plan(step.chunk_starts)

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        step: DeviceStep,
        window: int | None,
        out: Tensor,
    ) -> None:
        num, first, tables = step.num_decodes, step.first_chunk, step.block_tables
        slots, lens = step.slots, step.context_lens
        if num:
            self._decode(query[:num], keys, values, tables, window, out[:num])
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
            )

    def rotated(
        self,
        projected: Tensor,
        rotation: Rotation,
        keys: Tensor,
        values: Tensor,
        step: DeviceStep,
        window: int | None,
        out: Tensor,
    ) -> None:
        """See `RotatingAttention`."""
        tables, kv_slots = step.block_tables, step.kv_slots
        self._decode(projected, keys, values, tables, window, out, rotation, kv_slots)


def _decode_lens(step: DeviceStep) -> Tensor:
    lens = step.decode_lens
    return step.context_lens[: step.num_decodes] if lens is None else lens


_LOG2_E = 1.4426950408889634


def _padded(head_dim: int) -> int:
    """Matrix units need powers of two, at least 16."""
    return max(16, next_power_of_2(head_dim))


def _constants(shape: AttentionShape) -> dict[str, int]:
    return {
        "NUM_HEADS": shape.num_heads,
        "NUM_KV_HEADS": shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim,
        "DIMS": _padded(shape.head_dim),
        "BLOCK_SIZE": shape.block_size,
    }


@triton.jit(
    do_not_specialize=["num_rows", "window", "num_pieces", "at_once"],
    do_not_specialize_on_alignment=["context_lens", "row_slots"],
)
def _plan_decode(
    context_lens,
    row_slots,
    items,
    first_item,
    num_rows,
    window,
    num_pieces,
    at_once,
    LONG: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: pieces of equal length for all rows, about at_once in total, or about num_pieces
    where they would be longer than LONG."""
    wait_for_kernels_before(PDL)
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    end = tl.load(context_lens + row, mask=is_row, other=0)
    slot = tl.load(row_slots + row, mask=is_row, other=0)
    begin = tl.where(window > 0, tl.maximum(end - window, 0) // TILE * TILE, 0)
    length = end - begin
    total = tl.sum(length)
    piece = tl.maximum(tl.cdiv(tl.cdiv(total, num_pieces), TILE) * TILE, TILE)
    piece = tl.maximum(piece, tl.minimum(tl.cdiv(tl.cdiv(total, at_once), TILE) * TILE, LONG))
    count = tl.cdiv(length, piece)
    # The pieces of one row have equal lengths; those of rows with different lengths may differ.
    step = tl.cdiv(tl.cdiv(length, tl.maximum(count, 1)), TILE) * TILE
    count = tl.cdiv(length, tl.maximum(step, 1))
    first = tl.cumsum(count) - count
    tl.store(first_item + row, first, mask=is_row)
    tl.store(first_item + num_rows, tl.sum(count))
    for index in range(0, tl.max(count)):
        has = is_row & (index < count)
        item = items + (first + index) * 8
        start = begin + index * step
        tl.store(item, row, mask=has)
        tl.store(item + 1, start, mask=has)
        tl.store(item + 2, tl.minimum(start + step, end), mask=has)
        tl.store(item + 3, count, mask=has)
        tl.store(item + 4, first, mask=has)
        tl.store(item + 5, slot, mask=has)
        tl.store(item + 6, end, mask=has)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["query_starts"])
def _plan_prefill(
    query_starts,
    items,
    first_item,
    num_rows,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
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
def _pool_rows(table, position, is_key, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The pool indices, in tokens, of the tokens at these TILE successive positions."""
    if BLOCK_SIZE % TILE == 0:  # all are in one block
        first = tl.min(position)
        block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
        return block * BLOCK_SIZE + position % BLOCK_SIZE
    blocks = tl.load(table + position // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    return blocks * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def _attend(
    q,
    query_position,
    table,
    keys,
    values,
    start,
    end,
    window,
    scale,
    kv_head,
    acc,
    peak,
    total,
    IS_MASKED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Adds the keys [start, start + TILE) below `end` to a running softmax, in powers of two."""
    dim = tl.arange(0, DIMS)
    position = start + tl.arange(0, TILE)
    is_key = position < end
    rows = _pool_rows(table, position, is_key, BLOCK_SIZE, TILE)
    offset = rows[:, None] * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + dim[None, :]
    # Values past the end have weight 0, but 0 times NaN is NaN: they are not read.
    is_there = is_key[:, None] & (dim < HEAD_DIM)[None, :]
    k = tl.load(keys + offset, mask=is_there, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if IS_MASKED:
        seen = is_key[None, :] & (position[None, :] <= query_position[:, None])
        if window > 0:
            seen = seen & (position[None, :] > query_position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    v = tl.load(values + offset, mask=is_there, other=0.0)
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    kept = tl.exp2(peak - new_peak)
    total = total * kept + tl.sum(weights, 1)
    acc = acc * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return acc, new_peak, total


@triton.jit
def _rotated(
    row,
    first,
    norm,
    cos,
    sin,
    eps,
    mask,
    HAS_NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Heads of a row of the projection, normed and rotated, to the bit as `_rotate_and_store`
    computes them where both multiply and add alike.

    first: (heads,) the offset of each head in the row. cos, sin: those of its position.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    dim = tl.arange(0, DIMS)[None, :]
    # The other of the pair that is rotated together.
    other = (dim + HALF) % HEAD_DIM
    x = tl.load(row + (first[:, None] + dim), mask=mask, other=0.0)
    kind = x.dtype
    x = x.to(tl.float32)
    partner = tl.load(row + (first[:, None] + other), mask=mask, other=0.0).to(tl.float32)
    is_dim = dim < HEAD_DIM
    if HAS_NORM:
        left = tl.where(dim < HALF, x, 0.0)
        square = tl.sum(left * left, 1) + tl.sum((x - left) * (x - left), 1)
        scale = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        weight = tl.load(norm + dim, mask=is_dim, other=0.0).to(tl.float32)
        of_partner = tl.load(norm + other, mask=is_dim, other=0.0).to(tl.float32)
        x = ((x * scale).to(kind).to(tl.float32) * weight).to(kind).to(tl.float32)
        partner = (partner * scale).to(kind).to(tl.float32)
        partner = (partner * of_partner).to(kind).to(tl.float32)
    c = tl.load(cos + dim % HALF, mask=is_dim, other=0.0)
    s = tl.load(sin + dim % HALF, mask=is_dim, other=0.0)
    rotated = (x * c + partner * tl.where(dim < HALF, -s, s)).to(kind)
    if kind == tl.float16:
        # NaN for what it cannot hold, as in penstock.engine.models.layers.rotary.
        rotated += rotated - rotated
    return rotated


@triton.jit
def _combine(
    partial,
    lse,
    first,
    count,
    kv_head,
    target,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    COMBINED: tl.constexpr,
):
    """Writes a row's query heads of one KV head from its pieces. target: of the row."""
    dim = tl.arange(0, DIMS)
    member = tl.arange(0, GROUP_SIZE)
    head = kv_head * GROUP + member
    acc = tl.zeros((GROUP_SIZE, DIMS), tl.float32)
    peak = tl.full((GROUP_SIZE,), -1.0e30, tl.float32)
    total = tl.zeros((GROUP_SIZE,), tl.float32)
    is_there = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    for start in range(0, count, COMBINED):
        piece = start + tl.arange(0, COMBINED)
        is_piece = piece < count
        at = (first + piece).to(tl.int64)[:, None] * NUM_HEADS + head[None, :]
        mask = is_piece[:, None] & (member < GROUP)[None, :]
        # Other programs have just written them: they are in L2, not in this multiprocessor's L1.
        size = tl.load(lse + at, mask=mask, other=-1.0e30, cache_modifier=".cg")
        source = partial + at[:, :, None] * HEAD_DIM + dim[None, None, :]
        mixed = tl.load(
            source, mask=is_piece[:, None, None] & is_there[None, :, :], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        new_peak = tl.maximum(peak, tl.max(size, 0))
        kept = tl.exp2(peak - new_peak)
        weight = tl.exp2(size - new_peak[None, :])
        acc = acc * kept[:, None] + tl.sum(mixed * weight[:, :, None], 0)
        total = total * kept + tl.sum(weight, 0)
        peak = new_peak
    offset = head[:, None] * HEAD_DIM + dim[None, :]
    tl.store(target + offset, (acc / total[:, None]).to(target.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=["num_rows", "table_stride", "window"])
def _decode(
    query,
    keys,
    values,
    block_tables,
    items,
    first_item,
    out,
    partial,
    lse,
    arrived,
    kv_slots,
    cos,
    sin,
    query_norm,
    key_norm,
    eps,
    num_rows,
    table_stride,
    window,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROTATES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    COMBINED: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Pieces of rows, for all query heads of one KV head each, one after the other."""
    wait_for_kernels_before(PDL)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    QUERY_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS if ROTATES else NUM_HEADS
    member = tl.arange(0, GROUP_ROWS)
    dim = tl.arange(0, DIMS)
    is_there = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    num_work = tl.load(first_item + num_rows) * NUM_KV_HEADS
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        item = work // NUM_KV_HEADS
        kv_head = work % NUM_KV_HEADS
        row = tl.load(items + item * 8).to(tl.int64)
        begin = tl.load(items + item * 8 + 1)
        end = tl.load(items + item * 8 + 2)
        count = tl.load(items + item * 8 + 3)
        first = tl.load(items + item * 8 + 4)
        slot = tl.load(items + item * 8 + 5).to(tl.int64)
        context_len = tl.load(items + item * 8 + 6)
        table = block_tables + slot * table_stride
        head = kv_head * GROUP + member
        offset = head[:, None] * HEAD_DIM + dim[None, :]
        source = query + row * QUERY_HEADS * HEAD_DIM
        if ROTATES:
            angle = (context_len - 1).to(tl.int64) * (HEAD_DIM // 2)
            q = _rotated(
                source, head * HEAD_DIM, query_norm, cos + angle, sin + angle, eps, is_there,
                HAS_NORM, HEAD_DIM, DIMS,
            )  # fmt: skip
            # The row's last piece has the token whose key and value are not in the pool yet.
            is_new = (dim < tl.where(end == context_len, HEAD_DIM, 0))[None, :]
            new = tl.zeros((1,), tl.int32) + (NUM_HEADS + kv_head) * HEAD_DIM
            key = _rotated(
                source, new, key_norm, cos + angle, sin + angle, eps, is_new,
                HAS_NORM, HEAD_DIM, DIMS,
            )  # fmt: skip
            of_value = source + (new + NUM_KV_HEADS * HEAD_DIM)[:, None]
            value = tl.load(of_value + dim[None, :], mask=is_new, other=0.0)
            place = (tl.load(kv_slots + row) * NUM_KV_HEADS + kv_head) * HEAD_DIM + dim[None, :]
            tl.store(keys + place, key, mask=is_new)
            tl.store(values + place, value, mask=is_new)
            # All threads of this program see them; no other program reads them in this launch.
            tl.debug_barrier()
        else:
            q = tl.load(source + offset, mask=is_there, other=0.0)
        query_position = tl.zeros((GROUP_ROWS,), tl.int32) + context_len - 1

        acc = tl.zeros((GROUP_ROWS, DIMS), tl.float32)
        peak = tl.full((GROUP_ROWS,), -1.0e30, tl.float32)
        total = tl.zeros((GROUP_ROWS,), tl.float32)
        for start in range(begin, end, TILE):
            acc, peak, total = _attend(
                q, query_position, table, keys, values, start, end, window, scale, kv_head,
                acc, peak, total, True, NUM_KV_HEADS, HEAD_DIM, DIMS, BLOCK_SIZE, TILE,
            )  # fmt: skip
        mixed = acc / total[:, None]
        target = out + row * NUM_HEADS * HEAD_DIM
        if count == 1:
            tl.store(target + offset, mixed.to(out.dtype.element_ty), mask=is_there)
        else:
            wide = item.to(tl.int64) * NUM_HEADS
            tl.store(partial + wide * HEAD_DIM + offset, mixed, mask=is_there)
            tl.store(lse + wide + head, peak + tl.log2(total), mask=member < GROUP)
            # Before the one thread that counts, all of them have stored.
            tl.debug_barrier()
            counter = arrived + row * NUM_KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1:
                _combine(
                    partial, lse, first, count, kv_head, target,
                    NUM_HEADS, HEAD_DIM, DIMS, GROUP, GROUP_SIZE, COMBINED,
                )  # fmt: skip
                tl.store(counter, 0)


@triton.jit(
    do_not_specialize=["num_rows", "table_stride", "window"],
    # Slices of a step's tensors, see `_gather_chunks`.
    do_not_specialize_on_alignment=["row_slots", "query_starts", "context_lens"],
)
def _prefill(
    query,
    keys,
    values,
    block_tables,
    row_slots,
    query_starts,
    context_lens,
    items,
    first_item,
    out,
    num_rows,
    table_stride,
    window,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
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
        row = tl.load(items + item * 8)
        first_token = tl.load(items + item * 8 + 1)
        end_token = tl.load(items + item * 8 + 2)
        start_of_row = tl.load(query_starts + row)
        context_len = tl.load(context_lens + row)
        # The position of the chunk's first token.
        first_position = context_len - (tl.load(query_starts + row + 1) - start_of_row)
        table = block_tables + tl.load(row_slots + row).to(tl.int64) * table_stride

        token = first_token + member // GROUP
        is_query = (member < TOKENS * GROUP) & (token < end_token)
        head = kv_head * GROUP + member % GROUP
        offset = ((start_of_row + token).to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM
        offset = offset + dim[None, :]
        is_there = is_query[:, None] & (dim < HEAD_DIM)[None, :]
        q = tl.load(query + offset, mask=is_there, other=0.0)
        # Padding queries take the last one's position, so that they attend to some key.
        query_position = first_position + tl.minimum(token, end_token - 1)

        acc = tl.zeros((QUERY_ROWS, DIMS), tl.float32)
        peak = tl.full((QUERY_ROWS,), -1.0e30, tl.float32)
        total = tl.zeros((QUERY_ROWS,), tl.float32)
        end = first_position + end_token
        begin = 0
        # Below this, every token of the tile attends to every key.
        all_seen = (first_position + first_token + 1) // TILE * TILE
        if window > 0:
            begin = tl.maximum(first_position + first_token + 1 - window, 0) // TILE * TILE
            all_seen = begin
        for start in range(begin, all_seen, TILE):
            acc, peak, total = _attend(
                q, query_position, table, keys, values, start, end, window, scale, kv_head,
                acc, peak, total, False, NUM_KV_HEADS, HEAD_DIM, DIMS, BLOCK_SIZE, TILE,
            )  # fmt: skip
        for start in range(all_seen, end, TILE):
            acc, peak, total = _attend(
                q, query_position, table, keys, values, start, end, window, scale, kv_head,
                acc, peak, total, True, NUM_KV_HEADS, HEAD_DIM, DIMS, BLOCK_SIZE, TILE,
            )  # fmt: skip
        mixed = acc / total[:, None]
        tl.store(out + offset, mixed.to(out.dtype.element_ty), mask=is_there)
