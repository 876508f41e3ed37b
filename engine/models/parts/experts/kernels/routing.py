"""Which experts compute a token, and tiles of rows of one expert, without a word to the host.

A row is a pair of a token and one of its experts, numbered as `Routes` has them. Rows are sorted by
expert, and each expert's fill tiles of their own, the last of which may have fewer: as vLLM's and
SGLang's `moe_align_block_size`, which take four kernels for it, or one with atomic counters.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import max_shared_bytes, next_power_of_2

# The left operand of a product has so many rows at least. With more, a weight is read less often
# from the cache, and rows that a tile lacks cost more.
FEW_ROWS, MANY_ROWS = 16, 128
# Of a block with tiles of so many; other devices than Hopper and data-centre Blackwell have less.
_SHARED_BYTES = 192 * 1024
# Rows that a program looks at, and tiles that it writes, at a time.
_CHUNK, _TILES = 4096, 64


class Routes(NamedTuple):
    """experts: (T, num_per_token) int32, the likeliest first. weights: as many, float32."""

    experts: Tensor
    weights: Tensor


class Tiles(NamedTuple):
    """Rows that are computed together, at most `rows`: those from `firsts` on in `order`, of which
    there are `counts`, by `experts`; each (tiles,) int32, and order (T * num_per_token,) int32. A
    tile may have none."""

    rows: int
    order: Tensor
    experts: Tensor
    firsts: Tensor
    counts: Tensor


def route(
    logits: Tensor, num_per_token: int, *, is_normed: bool, factors: Tensor | None = None
) -> Routes:
    """As `penstock.engine.models.layers.experts.routes`. logits: (T, num_experts)."""
    num_tokens, num_experts = logits.shape
    experts = torch.empty(num_tokens, num_per_token, dtype=torch.int32, device=logits.device)
    weights = torch.empty_like(experts, dtype=torch.float32)
    _route[(num_tokens,)](
        logits, factors, experts, weights, num_experts,
        EACH=num_per_token, IS_NORMED=is_normed, SIZE=next_power_of_2(num_experts),
        SLOTS=next_power_of_2(num_per_token), num_warps=1, **overlapped(),
    )  # fmt: skip
    return Routes(experts, weights)


def tiles_of(experts: Tensor, num_experts: int) -> Tiles:
    """experts: as in `Routes`."""
    num_rows = experts.numel()
    # At most twice as many as an expert has on average: so vLLM's measurements choose them on an
    # H200 (its E=128,N=768 and E=512,N=512 of 8 and 10 experts a token, and E=8,N=14336).
    rows = max(FEW_ROWS, next_power_of_2(num_rows // num_experts + 1))
    rows = min(rows, MANY_ROWS if max_shared_bytes() >= _SHARED_BYTES else MANY_ROWS // 2)
    order = torch.empty(num_rows, dtype=torch.int32, device=experts.device)
    # As many as there can be; the host does not know how many there are.
    num_tiles = min(num_rows, num_rows // rows + num_experts)
    tiles = Tiles(rows, order, *(order.new_empty(num_tiles) for _ in range(3)))
    _sort[(num_experts,)](
        experts, *tiles[1:], num_rows, rows, CHUNK=_CHUNK, TILES=_TILES, num_warps=8,
        **overlapped(),
    )  # fmt: skip
    return tiles


@triton.jit(do_not_specialize=["num_rows", "rows"])
def _sort(
    chosen, order, experts, firsts, counts, num_rows, rows,
    CHUNK: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The rows of one expert, and its tiles. It needs no other program's: rows before it have
    filled `before // rows` tiles at most, and each expert before it has begun one at most, so that
    the tiles from there on, or from `before` on where that is less, are free."""
    wait_for_kernels_before(PDL)
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    num_before = tl.zeros((CHUNK,), tl.int32)
    num_own = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, num_rows, CHUNK):
        row = start + lane
        each = tl.load(chosen + row, mask=row < num_rows, other=2**30)
        num_before += (each < expert).to(tl.int32)
        num_own += (each == expert).to(tl.int32)
    first = tl.sum(num_before, 0)
    count = tl.sum(num_own, 0)
    place = first
    for start in range(0, num_rows, CHUNK):
        row = start + lane
        is_own = tl.load(chosen + row, mask=row < num_rows, other=2**30) == expert
        upto = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(order + place + upto - 1, row, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), 0)
    first_tile = tl.minimum(first, first // rows + expert)
    end_tile = tl.minimum(first + count, (first + count) // rows + expert + 1)
    for start in range(first_tile, end_tile, TILES):
        tile = start + tl.arange(0, TILES)
        is_own_tile = tile < end_tile
        done = tl.minimum((tile - first_tile) * rows, count)
        tl.store(experts + tile, expert, mask=is_own_tile)
        tl.store(firsts + tile, first + done, mask=is_own_tile)
        tl.store(counts + tile, tl.minimum(count - done, rows), mask=is_own_tile)


@triton.jit
def _route(
    logits, factors, experts, weights, num_experts,
    EACH: tl.constexpr, IS_NORMED: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token. Of equal logits that of the first expert counts as higher."""
    wait_for_kernels_before(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, SIZE)
    slot = tl.arange(0, SLOTS)
    is_expert = expert < num_experts
    logit = tl.load(logits + token * num_experts + expert, mask=is_expert, other=-float("inf"))
    logit = logit.to(tl.float32)
    peak = tl.max(logit, 0)
    total = tl.sum(tl.exp(logit - peak), 0)
    chosen = tl.zeros((SLOTS,), tl.int32)
    weight = tl.zeros((SLOTS,), tl.float32)
    for index in range(EACH):
        best = tl.max(logit, 0)
        # Where all are NaN none is the highest.
        first = tl.minimum(tl.min(tl.where(logit == best, expert, SIZE), 0), num_experts - 1)
        chosen = tl.where(slot == index, first, chosen)
        weight = tl.where(slot == index, tl.exp(best - peak), weight)
        logit = tl.where(expert == first, -float("inf"), logit)
    if IS_NORMED:
        total = tl.sum(weight, 0)
    mask = slot < EACH
    tl.store(experts + token * EACH + slot, chosen, mask=mask)
    weight = weight / total
    if factors is not None:
        weight *= tl.load(factors + chosen, mask=mask, other=0.0)
    tl.store(weights + token * EACH + slot, weight, mask=mask)
