"""`PagedDecode`: launches the kernels of rows with one query token each, or with a few, which read
their keys once."""

from functools import cache

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
from penstock.engine.kernels.kv_codes import (
    encode,
    inverse_scale,
    pointers,
    scale_of,
    scale_offsets,
)
from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import next_power_of_2
from penstock.engine.step.device_step import (
    DecodeQueries,
    DraftSizes,
    Rotation,
    rotation_arguments,
)

# Keys in a tile. A tile is within one block if blocks are at least as large.
_TILE = 64
# Programs of a decode that a multiprocessor holds, by shared memory at head size 128.
DECODES_PER_SM = 3
# Where a tile has more queries than the matrix units' smallest one.
_LARGE_PER_SM = 2
# Of latents, whose sums take the registers. Of pieces twice as many: the partial results of all
# heads of one take tens of kilobytes.
_LATENTS_PER_SM, _LATENT_PIECES_PER_SM = 1, 2
# While there is less than this for each program, all pieces run at once; with more, in several
# rounds, so that little of the device is idle in the last one.
_LONG_PIECE = 512
# Pieces per multiprocessor, of all KV heads, at the most.
_PIECES_PER_SM = 8
# The pieces of a row that are combined at a time; fewer where these would have more numbers.
_COMBINED, _MOST_COMBINED = 8, 8192
# Of queries by dimensions. Larger sums would take too many of a thread's registers.
_SUMS_OF_4_WARPS = 8192


class PagedDecode:
    """One query token per row, or a few where rows have drafts. Owns the work lists and partial
    results. `plan` once a step, then call it for each layer."""

    def __init__(
        self,
        shape: AttentionShape,
        max_rows: int,
        num_sms: int,
        device: torch.device,
        *,
        per_sm: int = DECODES_PER_SM,
        drafted: DraftSizes | None = None,
    ) -> None:
        """num_sms: multiprocessors of the device. per_sm: programs for each. drafted: None where no
        row has drafts. Allocates some MB, or some tens where rows have any."""
        self._shape = shape
        heads, dim = shape.num_heads, shape.value_dim
        kv_heads = _constants(shape, 1)["NUM_KV_HEADS"]
        self._num_sms, self._per_sm = num_sms, per_sm
        pieces_per_sm = _LATENT_PIECES_PER_SM if shape.latent_dim else _PIECES_PER_SM
        self._num_pieces = max(1, pieces_per_sm * num_sms // kv_heads)
        num_partial = self._num_pieces + max_rows
        if drafted is not None:
            num_drafted = self._num_pieces + drafted.most_tokens
            num_partial = max(num_partial, num_drafted * drafted.queries)
            max_rows = max(max_rows, drafted.most_tokens)
        self._max_rows = max_rows
        self._device = device
        self._lists: dict[int | None, WorkList] = {}
        self._partial = torch.empty(num_partial, heads, dim, dtype=torch.float32, device=device)
        self._lse = torch.empty(num_partial, heads, dtype=torch.float32, device=device)
        # Pieces of each row that have been computed; zeros between two launches.
        self._arrived = torch.zeros(max_rows, kv_heads, dtype=torch.int32, device=device)

    def plan(
        self,
        context_lens: Tensor,
        row_slots: Tensor,
        window: int | None,
        queries: DecodeQueries | None = None,
    ) -> None:
        """Lists the pieces of rows with these lengths, (B,) int32, this step's tokens included.

        row_slots: (B,) int32. queries: None where each row has one. Call it once a step for each
        window that the model's layers have. A row of length 0 is skipped: nothing is written for
        it.
        """
        num_rows = len(context_lens)
        assert num_rows <= self._max_rows, (num_rows, self._max_rows)
        if window not in self._lists:  # in a graph, every replay would fill it with zeros
            max_items = self._num_pieces + self._max_rows
            self._lists[window] = WorkList.empty(max_items, self._max_rows, self._device)
        work, most_queries = self._lists[window], 1 if queries is None else queries.most
        kv_heads = _constants(self._shape, most_queries)["NUM_KV_HEADS"]
        at_once = max(1, self._num_programs(most_queries) // kv_heads)
        _plan_decode[(1,)](
            context_lens, row_slots, work.items, work.first_item, work.tokens, num_rows,
            window or 0, self._num_pieces, at_once,
            *((None, None) if queries is None else (queries.firsts, queries.counts)),
            LONG=_LONG_PIECE, TILE=_TILE, ROWS=next_power_of_2(self._max_rows), num_warps=4,
            **overlapped(),
        )  # fmt: skip

    def __call__(
        self,
        query: Tensor,
        layer: LayerContext,
        block_tables: Tensor,
        out: Tensor,
        rotation: Rotation | None = None,
        kv_slots: Tensor | None = None,
        most_queries: int = 1,
        rotary_positions: Tensor | None = None,
    ) -> None:
        """Writes out, (T, num_heads, value_dim), of the rows that were planned.

        query: (T, num_heads, head_dim). block_tables: (num_slots, max_blocks) int32. rotation: if
        given, query is the projection instead, (T, (num_heads + kv_parts * num_kv_heads) *
        head_dim), and its keys and values are written to kv_slots, (T,) int64; of rows with one
        query, and not of latents. most_queries: of a row, a power of two. rotary_positions: as of
        `DeviceStep`.
        """
        assert rotation is None or most_queries == 1, most_queries
        shape, work, num_rows = self._shape, self._lists[layer.window], len(out)
        pages = pointers(layer.keys, layer.values)
        is_wide = query.dtype is torch.float32 and shape.head_dim > SMALL_HEAD
        constants = dict(_constants(shape, most_queries))
        most = (self._num_pieces + num_rows) * constants["NUM_KV_HEADS"]
        _decode[(min(self._num_programs(most_queries), most),)](
            query, *pages, block_tables, work.items, work.first_item, out, self._partial,
            self._lse, self._arrived, layer.sinks, num_rows, block_tables.stride(0),
            layer.window or 0, shape.head_dim**-0.5 * LOG2_E, kv_slots=kv_slots,
            rotary_positions=rotary_positions,
            **rotation_arguments(rotation, shape.head_dim), ROTATES=rotation is not None,
            **constants, **overlapped(),
            **_options(constants, is_wide=is_wide, is_coded=pages[2] is not None),
        )  # fmt: skip
        if most_queries > 1:
            for name in ("GROUP_ROWS", "REST", "REST_DIMS", "BLOCK_SIZE"):
                del constants[name]
            _combine_queries[(num_rows, constants["NUM_KV_HEADS"])](
                work.tokens, out, self._partial, self._lse, **constants, num_warps=4,
                **overlapped(),
            )  # fmt: skip

    def _num_programs(self, most_queries: int) -> int:
        """That the device holds, of such rows."""
        if self._shape.latent_dim:
            return self._num_sms * _LATENTS_PER_SM
        is_large = _constants(self._shape, most_queries)["GROUP_ROWS"] > 16
        return self._num_sms * (min(self._per_sm, _LARGE_PER_SM) if is_large else self._per_sm)

    def work_list(self, window: int | None) -> WorkList:
        """The pieces that the last `plan` with this window listed."""
        return self._lists[window]


@cache
def _constants(shape: AttentionShape, most_queries: int) -> dict[str, int]:
    """Those of rows with so many queries."""
    constants = shape_constants(shape, most_queries)
    group_size = next_power_of_2(shape.num_heads // constants["NUM_KV_HEADS"])
    combined = _MOST_COMBINED // (group_size * next_power_of_2(shape.value_dim))
    return constants | {
        "GROUP_ROWS": max(16, group_size * most_queries),
        "GROUP_SIZE": group_size,
        "QUERIES": most_queries,
        "COMBINED": max(1, min(_COMBINED, combined)),
    }


def _options(constants: dict[str, int], *, is_wide: bool, is_coded: bool) -> dict[str, int | None]:
    """TILE: keys in a tile. In float32, two tiles of 64 would not fit, and their products would
    spill registers; so would the numbers that codes are converted to, and heads of 512 dimensions.
    """
    head_dim, num_sums = constants["HEAD_DIM"], constants["GROUP_ROWS"] * constants["DIMS"]
    is_large = is_wide or head_dim > 128
    return {
        "TILE": _TILE >> (is_wide or is_coded) >> (head_dim > 256),
        "num_warps": 4 if num_sums <= _SUMS_OF_4_WARPS else 8,
        # The block table's indirection takes half of the stages: with five, two tiles are in
        # flight, 64 KiB of them at head size 128, and three programs fit a multiprocessor. Of codes
        # twice as many, of a quarter of the size each.
        "num_stages": 3 if is_large else 9 if is_coded else 5,
        # Three programs have so many each. Some compilers take more, for the rotation.
        "maxnreg": None if is_large or constants["GROUP_ROWS"] > 16 else 168,
    }


@triton.jit(
    do_not_specialize=["num_rows", "window", "num_pieces", "at_once"],
    do_not_specialize_on_alignment=["context_lens", "row_slots", "firsts", "counts"],
)
def _plan_decode(
    context_lens, row_slots, items, first_item, tokens, num_rows, window, num_pieces, at_once,
    firsts, counts, LONG: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: pieces of equal length for all rows, about at_once in total, or about num_pieces
    where they would be longer than LONG."""
    wait_for_kernels_before(PDL)
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    end = tl.load(context_lens + row, mask=is_row, other=0)
    slot = tl.load(row_slots + row, mask=is_row, other=0)
    token = row
    oldest = end  # the length at the first query
    if counts is not None:
        token = tl.load(firsts + row, mask=is_row, other=0)
        num_queries = tl.load(counts + row, mask=is_row, other=0)
        oldest = end - num_queries + 1
    begin = tl.where(window > 0, tl.maximum(oldest - window, 0) // TILE * TILE, 0)
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
        tl.store(item, token, mask=has)
        tl.store(item + 1, start, mask=has)
        tl.store(item + 2, tl.minimum(start + step, end), mask=has)
        tl.store(item + 3, count, mask=has)
        tl.store(item + 4, first, mask=has)
        tl.store(item + 5, slot, mask=has)
        tl.store(item + 6, end, mask=has)
        if counts is not None:
            tl.store(item + 7, num_queries, mask=has)
    if counts is not None:
        for query in range(0, tl.max(num_queries)):
            has = is_row & (query < num_queries)
            place = tokens + (token + query) * 4
            tl.store(place, first, mask=has)
            tl.store(place + 1, count, mask=has)
            tl.store(place + 2, query + first * 0, mask=has)


@triton.jit
def _partners(dim, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """The other dimension of each one's pair, which is rotated with it, and the pair's number."""
    HALF: tl.constexpr = HEAD_DIM // 2
    TURNED: tl.constexpr = ROTARY_DIM // 2
    other = (dim + HALF) % HEAD_DIM
    pair = dim % HALF
    if ROTARY_DIM < HEAD_DIM:
        other = tl.where(dim < ROTARY_DIM, (dim + TURNED) % ROTARY_DIM, dim)
        pair = tl.where(dim < ROTARY_DIM, dim % TURNED, TURNED)  # that and all after it: no angle
    return other, pair


@triton.jit
def _inverse_rms(x, dim, eps, HEAD_DIM: tl.constexpr):
    """A norm without a weight multiplies each head by it, (heads, 1): to the bit as in
    `_rotate_and_store`, which adds up halves."""
    left = tl.where(dim < HEAD_DIM // 2, x, 0.0)
    square = tl.sum(left * left, 1) + tl.sum((x - left) * (x - left), 1)
    return tl.rsqrt(square / HEAD_DIM + eps)[:, None]


@triton.jit
def _normed(x, scale, norm, dim, is_dim, kind: tl.constexpr):
    weight = tl.load(norm + dim, mask=is_dim, other=0.0).to(tl.float32)
    return ((x * scale).to(norm.dtype.element_ty).to(tl.float32) * weight).to(kind).to(tl.float32)


@triton.jit
def _rotated(
    row, first, norm, cos, sin, factor, eps, mask,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Heads of a row of the projection, normed and rotated, to the bit as `_rotate_and_store`
    computes them where both multiply and add alike.

    first: (heads,) the offset of each head in the row. norm: a weight, or None. cos, sin: those of
    its position. factor: what the heads are multiplied by, or None.
    """
    dim = tl.arange(0, DIMS)[None, :]
    other, pair = _partners(dim, HEAD_DIM, ROTARY_DIM)
    x = tl.load(row + (first[:, None] + dim), mask=mask, other=0.0)
    kind: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    partner = tl.load(row + (first[:, None] + other), mask=mask, other=0.0).to(tl.float32)
    is_dim = dim < HEAD_DIM
    if norm is not None:
        scale = _inverse_rms(x, dim, eps, HEAD_DIM)
        x = _normed(x, scale, norm, dim, is_dim, kind)
        partner = _normed(partner, scale, norm, other, is_dim, kind)
    c = tl.load(cos + pair, mask=is_dim, other=0.0)
    s = tl.load(sin + pair, mask=is_dim, other=0.0)
    turned = x * c + partner * tl.where(dim < ROTARY_DIM // 2, -s, s)
    if factor is not None:
        turned *= factor
    rotated = turned.to(kind)
    if kind == tl.float16:
        # NaN for what it cannot hold, as in penstock.engine.models.layers.rotary.
        rotated += rotated - rotated
    return rotated


@triton.jit
def _coded(x, kind: tl.constexpr):
    """Codes of heads, (heads, DIMS), and their scales: as `_rotate_and_store` makes them."""
    x = x.to(tl.float32)
    peak = tl.max(tl.abs(x), 1)
    codes = encode(x, inverse_scale(peak, kind)[:, None], kind)
    return codes, scale_of(peak, tl.sum(x * 0.0, 1), kind)


@triton.jit
def _heads(
    member, kv_head, num_queries,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_SIZE: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """The heads of the queries that a tile has, those of one token next to each other; the number
    of each among all heads of the row's tokens; and whether there is such a one."""
    head = kv_head * GROUP + member
    place = head
    is_head = member < GROUP
    if QUERIES > 1:
        query = member // GROUP_SIZE
        head = kv_head * GROUP + member % GROUP_SIZE
        place = query * NUM_HEADS + head
        is_head = (member % GROUP_SIZE < GROUP) & (query < num_queries)
    return head, place, is_head


@triton.jit
def _combine(
    partial, lse, first, count, kv_head, target,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_SIZE: tl.constexpr, QUERIES: tl.constexpr, COMBINED: tl.constexpr,
):  # fmt: skip
    """Writes a query's heads of one KV head from its row's pieces. partial, lse: of that query in
    piece 0. target: of the query."""
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
        at = (first + piece).to(tl.int64)[:, None] * (QUERIES * NUM_HEADS) + head[None, :]
        mask = is_piece[:, None] & (member < GROUP)[None, :]
        # Other programs have just written them: they are in L2, not in this multiprocessor's L1.
        size = tl.load(lse + at, mask=mask, other=-1.0e30, cache_modifier=".cg")
        source = partial + at[:, :, None] * HEAD_DIM + dim[None, None, :]
        mixed = tl.load(
            source, mask=is_piece[:, None, None] & is_there[None, :, :], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        new_peak = tl.maximum(peak, tl.max(size, 0))
        share = tl.exp2(peak - new_peak)
        weight = tl.exp2(size - new_peak[None, :])
        acc = acc * share[:, None] + tl.sum(mixed * weight[:, :, None], 0)
        total = total * share + tl.sum(weight, 0)
        peak = new_peak
    offset = head[:, None] * HEAD_DIM + dim[None, :]
    tl.store(target + offset, (acc / total[:, None]).to(target.dtype.element_ty), mask=is_there)


@triton.jit
def _combine_queries(
    tokens, out, partial, lse,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr, GROUP_SIZE: tl.constexpr, QUERIES: tl.constexpr, COMBINED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One query's heads of one KV head, where its row has several pieces."""
    wait_for_kernels_before(PDL)
    token = tl.program_id(0).to(tl.int64)
    first = tl.load(tokens + token * 4)
    count = tl.load(tokens + token * 4 + 1)
    query = tl.load(tokens + token * 4 + 2).to(tl.int64)
    if count > 1:
        _combine(
            partial + query * NUM_HEADS * HEAD_DIM, lse + query * NUM_HEADS, first, count,
            tl.program_id(1), out + token * NUM_HEADS * HEAD_DIM,
            NUM_HEADS, HEAD_DIM, DIMS, NUM_HEADS // NUM_KV_HEADS, GROUP_SIZE, QUERIES, COMBINED,
        )  # fmt: skip


@triton.jit
def _store_new(
    source, row, kv_head, is_last, keys, values, key_scales, value_scales, kv_slots, cos, sin,
    key_norm, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROTARY_DIM: tl.constexpr,
    KV_PARTS: tl.constexpr, NORMS_VALUES: tl.constexpr,
):  # fmt: skip
    """Makes a row's new key and value of the projection, and stores them where `is_last`."""
    dim = tl.arange(0, DIMS)
    is_new = (dim < tl.where(is_last, HEAD_DIM, 0))[None, :]
    first = tl.zeros((1,), tl.int32) + (NUM_HEADS + kv_head) * HEAD_DIM
    key = _rotated(source, first, key_norm, cos, sin, None, eps, is_new, HEAD_DIM, ROTARY_DIM, DIMS)
    place = source + (first + (KV_PARTS - 1) * NUM_KV_HEADS * HEAD_DIM)[:, None]
    value = tl.load(place + dim[None, :], mask=is_new, other=0.0)
    if NORMS_VALUES:
        wide = value.to(tl.float32)
        value = (wide * _inverse_rms(wide, dim[None, :], eps, HEAD_DIM)).to(value.dtype)
    kv_slot = tl.load(kv_slots + row)
    if key_scales is not None:
        # One scale: `first` is one head.
        at = scale_offsets(kv_slot + first * 0, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
        mask = first < tl.where(is_last, first + 1, 0)
        key, key_scale = _coded(key, keys.dtype.element_ty)
        value, value_scale = _coded(value, values.dtype.element_ty)
        tl.store(key_scales + at, key_scale, mask=mask)
        tl.store(value_scales + at, value_scale, mask=mask)
    target = (kv_slot * NUM_KV_HEADS + kv_head) * HEAD_DIM + dim[None, :]
    tl.store(keys + target, key, mask=is_new)
    tl.store(values + target, value, mask=is_new)
    # All threads of this program see them; no other program reads them in this launch.
    tl.debug_barrier()


@triton.jit
def _store_piece(
    acc, peak, total, item, first, count, row, kv_head, place, is_head, out, partial, lse, arrived,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr, GROUP_SIZE: tl.constexpr, QUERIES: tl.constexpr, COMBINED: tl.constexpr,
):  # fmt: skip
    """Writes a row's only piece to out; else one of several, which the last to arrive combines, or
    `_combine_queries` where rows have several queries: for one program that is too much."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    dim = tl.arange(0, DIMS)
    is_there = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    offset = place[:, None] * HEAD_DIM + dim[None, :]
    if QUERIES > 1:
        # Of a piece after a query, or behind its window, that query has seen nothing.
        total = tl.where(total > 0, total, 1.0)
    mixed = acc / total[:, None]
    target = out + row * NUM_HEADS * HEAD_DIM
    if count == 1:
        tl.store(target + offset, mixed.to(out.dtype.element_ty), mask=is_there)
    else:
        wide = item.to(tl.int64) * (QUERIES * NUM_HEADS)
        tl.store(partial + wide * HEAD_DIM + offset, mixed, mask=is_there)
        tl.store(lse + wide + place, peak + tl.log2(total), mask=is_head)
        if QUERIES == 1:
            # Before the one thread that counts, all of them have stored.
            tl.debug_barrier()
            counter = arrived + row * NUM_KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1:
                _combine(
                    partial, lse, first, count, kv_head, target,
                    NUM_HEADS, HEAD_DIM, DIMS, GROUP, GROUP_SIZE, QUERIES, COMBINED,
                )  # fmt: skip
                tl.store(counter, 0)


@triton.jit(do_not_specialize=["num_rows", "table_stride", "window"])
def _decode(
    query, keys, values, key_scales, value_scales, block_tables, items, first_item, out, partial,
    lse, arrived, sinks, num_rows, table_stride, window, scale,
    kv_slots, rotary_positions, cos, sin, query_norm, key_norm, query_factors, eps, angles_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr, REST: tl.constexpr, REST_DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROTATES: tl.constexpr, ROTARY_DIM: tl.constexpr, KV_PARTS: tl.constexpr,
    NORMS_VALUES: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, COMBINED: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Pieces of rows, for all query heads of one KV head each, one after the other."""
    wait_for_kernels_before(PDL)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    QUERY_HEADS: tl.constexpr = NUM_HEADS + KV_PARTS * NUM_KV_HEADS if ROTATES else NUM_HEADS
    member = tl.arange(0, GROUP_ROWS)
    dim = tl.arange(0, DIMS)
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
        num_queries = 1
        if QUERIES > 1:
            num_queries = tl.load(items + item * 8 + 7)
        table = block_tables + slot * table_stride
        head, place, is_head = _heads(
            member, kv_head, num_queries, NUM_HEADS, GROUP, GROUP_SIZE, QUERIES
        )
        is_there = is_head[:, None] & (dim < HEAD_DIM)[None, :]
        source = query + row * QUERY_HEADS * (HEAD_DIM + REST)
        q_rest = None
        if ROTATES:
            position = (context_len - 1).to(tl.int64)
            if rotary_positions is not None:
                position = tl.load(rotary_positions + row).to(tl.int64)
            angle = position * angles_stride
            factor = None
            if query_factors is not None:
                factor = tl.load(query_factors + position)
            q = _rotated(
                source, head * HEAD_DIM, query_norm, cos + angle, sin + angle, factor, eps,
                is_there, HEAD_DIM, ROTARY_DIM, DIMS,
            )  # fmt: skip
            if KV_PARTS > 0:
                # The row's last piece has the token whose key and value are not in the pool yet.
                _store_new(
                    source, row, kv_head, end == context_len, keys, values, key_scales,
                    value_scales, kv_slots, cos + angle, sin + angle, key_norm, eps,
                    NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, DIMS, BLOCK_SIZE, ROTARY_DIM, KV_PARTS,
                    NORMS_VALUES,
                )  # fmt: skip
        else:
            first_dim = place[:, None] * (HEAD_DIM + REST)
            q = tl.load(source + first_dim + dim[None, :], mask=is_there, other=0.0)
            if REST > 0:
                rest = tl.arange(0, REST_DIMS)
                is_rest = is_head[:, None] & (rest < REST)[None, :]
                place_of_rest = source + first_dim + HEAD_DIM + rest[None, :]
                q_rest = tl.load(place_of_rest, mask=is_rest, other=0.0)
        query_position = tl.zeros((GROUP_ROWS,), tl.int32) + context_len - 1
        if QUERIES > 1:
            query_position += member // GROUP_SIZE - num_queries + 1

        acc = tl.zeros((GROUP_ROWS, DIMS), tl.float32)
        peak = tl.full((GROUP_ROWS,), -1.0e30, tl.float32)
        total = tl.zeros((GROUP_ROWS,), tl.float32)
        if sinks is not None:
            # A score more, of the row's first piece alone.
            sink = sink_scores(sinks, head, is_head)
            peak = tl.where(item == first, sink, peak)
            total = tl.where(item == first, 1.0, total)
        for start in range(begin, end, TILE):
            acc, peak, total = attend(
                q, q_rest, query_position, query_position, table, keys, values, key_scales,
                value_scales, start, end, window, scale, kv_head, acc, peak, total, True,
                NUM_KV_HEADS, HEAD_DIM, DIMS, REST, REST_DIMS, BLOCK_SIZE, TILE,
            )  # fmt: skip
        _store_piece(
            acc, peak, total, item, first, count, row, kv_head, place, is_head, out, partial, lse,
            arrived,
            NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, DIMS, GROUP_SIZE, QUERIES, COMBINED,
        )  # fmt: skip
