"""LoRA adapters of linear layers: out += s B (A x), with each token's own A and B.

The adapters of all slots are in one tensor for each of A and B, so that a captured graph finds any
of them: see `LowRanks`. The tokens that share an adapter are in tiles (`AdapterTiles`), so that a
tile reads its adapter's weights once, whatever the order of the sequences. Two kernels compute it:
A x in parts of the columns, then B of their sum. Nothing is added atomically, so a step that is run
twice has the same bits. An adapter of a lower rank is read no further than that.

Sources: Chen et al. 2023, Punica (arXiv:2310.18547); Sheng et al. 2023, S-LoRA (arXiv:2311.03285).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import ceil_div, next_power_of_2
from penstock.engine.step.device_step import AdapterTiles

# Rows of a tile: the fewest that the matrix units take; and more, where a step has many tokens.
_FEW_ROWS, _MANY_ROWS = 16, 64
_MAX_TOKENS_OF_FEW = 256
# A program reads so many columns of A while tiles are too few to occupy the device.
_SPLIT_COLUMNS = 1024
_COLUMNS = 128
_MAX_RANKS = 64
# Outputs of a program.
BAND = 128


class LowRanks(NamedTuple):
    """The changes of one linear layer that stacks P projections, of the adapters in all slots.

    down: A, (slots, P * max_rank, columns). up: B transposed, (slots, max_rank, outputs), where a
    projection has its own outputs. ranks: (P, slots) int32, 0 where an adapter leaves a projection
    as it is. scales: (P, slots) float32. bands: (N, 3) int32, the outputs in parts of at most BAND:
    the projection, the first output, and the end. alignment: what divides all first outputs.
    """

    down: Tensor
    up: Tensor
    ranks: Tensor
    scales: Tensor
    bands: Tensor
    alignment: int


def tile_rows(num_tokens: int) -> int:
    """Tiles of a step of so many tokens have so many rows."""
    return _FEW_ROWS if num_tokens <= _MAX_TOKENS_OF_FEW else _MANY_ROWS


def most_tiles(num_tokens: int, num_slots: int) -> int:
    """The most tiles that so many tokens can be in."""
    return min(num_tokens, ceil_div(num_tokens, tile_rows(num_tokens)) + num_slots)


def add_low_rank(x: Tensor, changes: LowRanks, tiles: AdapterTiles, out: Tensor) -> None:
    """x: (T, columns). out: (T, outputs), where only the rows of `tiles` are changed. Sums are
    float32; A x is rounded to the type of B."""
    num_tokens, columns = x.shape
    projections, num_slots = changes.ranks.shape
    max_rank, outputs = changes.up.shape[1:]
    chunk = min(_COLUMNS, max(16, next_power_of_2(columns)))
    # Chunks of columns that a program adds up.
    num_chunks = ceil_div(_SPLIT_COLUMNS if tiles.rows == _FEW_ROWS else columns, chunk)
    splits = ceil_div(columns, num_chunks * chunk)
    ranks = min(_MAX_RANKS, max(16, next_power_of_2(max_rank)))
    width = projections * max_rank
    parts = x.new_empty(num_tokens, splits, width, dtype=changes.scales.dtype)
    num_tiles = len(tiles.counts)
    _shrink[(projections * ceil_div(max_rank, ranks), splits, num_tiles)](
        x, changes.down, changes.ranks, *tiles[:4], parts, columns, num_chunks, num_slots, width,
        splits,
        MAX_RANK=max_rank, ROWS=tiles.rows, RANKS=ranks, COLUMNS=chunk, num_warps=4, num_stages=3,
        **overlapped(),
    )  # fmt: skip
    _expand[(len(changes.bands), num_tiles)](
        parts, changes.up, changes.ranks, changes.scales, changes.bands, *tiles[:4], out, outputs,
        out.stride(0), num_slots, width, splits,
        MAX_RANK=max_rank, ROWS=tiles.rows, RANKS=ranks, OUTPUTS=BAND, ALIGNMENT=changes.alignment,
        num_warps=4, num_stages=3, **overlapped(),
    )  # fmt: skip


# Slices of one tensor, at any offset: see `tables._gather_chunks`.
_UNALIGNED = ["ranks", "order", "slots", "firsts", "counts"]
# Else each would be compiled for each kind of layer.
_COUNTS = ["num_chunks", "num_slots", "width", "splits"]


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_UNALIGNED)
def _shrink(
    x, down, ranks, order, slots, firsts, counts, parts, columns, num_chunks, num_slots, width,
    splits,
    MAX_RANK: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A x of a tile's rows: some ranks of one projection, over a part of the columns."""
    wait_for_kernels_before(PDL)
    tile = tl.program_id(2)
    count = tl.load(counts + tile)
    if count == 0:
        return
    BLOCKS: tl.constexpr = (MAX_RANK + RANKS - 1) // RANKS
    projection = (tl.program_id(0) // BLOCKS).to(tl.int64)
    slot = tl.load(slots + tile).to(tl.int64)
    num_ranks = tl.load(ranks + projection * num_slots + slot)
    first_rank = tl.program_id(0) % BLOCKS * RANKS
    if first_rank >= num_ranks:
        return
    is_row = tl.arange(0, ROWS) < count
    place = tl.load(firsts + tile) + tl.arange(0, ROWS)
    token = tl.load(order + place, mask=is_row, other=0).to(tl.int64)
    rank = first_rank + tl.arange(0, RANKS)
    is_rank = rank < num_ranks
    down_row = slot * width + projection * MAX_RANK + rank
    begin = tl.program_id(1).to(tl.int64) * num_chunks * COLUMNS
    end = tl.minimum(begin + num_chunks * COLUMNS, columns)
    total = tl.zeros((ROWS, RANKS), tl.float32)
    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_column = column < columns
        source = x + token[:, None] * columns + column[None, :]
        a = tl.load(source, mask=is_row[:, None] & is_column[None, :], other=0.0)
        source = down + down_row[:, None] * columns + column[None, :]
        w = tl.load(source, mask=is_rank[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(a, tl.trans(w), total, input_precision="ieee")
    part = (token * splits + tl.program_id(1)) * width + projection * MAX_RANK
    target = parts + part[:, None] + rank[None, :]
    tl.store(target, total, mask=is_row[:, None] & is_rank[None, :])


@triton.jit
def _sum_of_splits(source, mask, splits, width):
    total = tl.zeros(mask.shape, tl.float32)
    for _ in range(splits):
        total += tl.load(source, mask=mask, other=0.0)
        source += width
    return total


@triton.jit(do_not_specialize=_COUNTS[1:], do_not_specialize_on_alignment=[*_UNALIGNED, "scales"])
def _expand(
    parts, up, ranks, scales, bands, order, slots, firsts, counts, out, outputs, out_stride,
    num_slots, width, splits,
    MAX_RANK: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, OUTPUTS: tl.constexpr,
    ALIGNMENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds s B (A x) to a band of the outputs of a tile's rows."""
    wait_for_kernels_before(PDL)
    tile = tl.program_id(1)
    count = tl.load(counts + tile)
    if count == 0:
        return
    band = bands + 3 * tl.program_id(0)
    projection = tl.load(band).to(tl.int64)
    slot = tl.load(slots + tile).to(tl.int64)
    num_ranks = tl.load(ranks + projection * num_slots + slot)
    if num_ranks == 0:
        return
    is_row = tl.arange(0, ROWS) < count
    place = tl.load(firsts + tile) + tl.arange(0, ROWS)
    token = tl.load(order + place, mask=is_row, other=0).to(tl.int64)
    output = tl.multiple_of(tl.load(band + 1), ALIGNMENT) + tl.arange(0, OUTPUTS)
    is_output = output < tl.load(band + 2)
    part = token * splits * width + projection * MAX_RANK
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, num_ranks, RANKS):
        rank = start + tl.arange(0, RANKS)
        is_rank = rank < num_ranks
        mask = is_row[:, None] & is_rank[None, :]
        source = parts + part[:, None] + rank[None, :]
        reduced = _sum_of_splits(source, mask, splits, width)
        source = up + (slot * MAX_RANK + rank)[:, None] * outputs + output[None, :]
        w = tl.load(source, mask=is_rank[:, None] & is_output[None, :], other=0.0)
        total = tl.dot(reduced.to(w.dtype), w, total, input_precision="ieee")
    total *= tl.load(scales + projection * num_slots + slot)
    mask = is_row[:, None] & is_output[None, :]
    target = out + token[:, None] * out_stride + output[None, :]
    total += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)
