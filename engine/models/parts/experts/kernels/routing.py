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
from penstock.engine.models.parts.experts.config import LEAST_SUM, Experts

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
    logits: Tensor,
    experts: Experts,
    factors: Tensor | None = None,
    corrections: Tensor | None = None,
) -> Routes:
    """As `penstock.engine.models.parts.experts.layer.routes`. logits: (T, num_experts)."""
    (num_tokens, num_experts), each = logits.shape, experts.num_per_token
    chosen = torch.empty(num_tokens, each, dtype=torch.int32, device=logits.device)
    weights = torch.empty_like(chosen, dtype=torch.float32)
    _route[(num_tokens,)](
        logits, factors, corrections, chosen, weights, num_experts, experts.weight_factor,
        EACH=each, IS_NORMED=experts.is_normed, HAS_SIGMOIDS=experts.has_sigmoids,
        GROUPS=experts.num_groups, USED=experts.num_groups_used, BEST=experts.num_best,
        LEAST_SUM=LEAST_SUM, SIZE=next_power_of_2(num_experts), SLOTS=next_power_of_2(each),
        num_warps=1, **overlapped(),
    )  # fmt: skip
    return Routes(chosen, weights)


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
def _weight(logit, peak, HAS_SIGMOIDS: tl.constexpr):
    """Of a softmax before it is divided by the sum."""
    return 1.0 / (1.0 + tl.exp(-logit)) if HAS_SIGMOIDS else tl.exp(logit - peak)


@triton.jit
def _in_best_groups(
    choice, expert, size, GROUPS: tl.constexpr, USED: tl.constexpr, BEST: tl.constexpr
):
    """Each expert's choice, for those of other groups less than any. size: of a group."""
    group = expert // size
    total = tl.full(choice.shape, -float("inf"), tl.float32)
    for index in range(GROUPS):
        own = tl.where(group == index, choice, -float("inf"))
        best = tl.max(own, 0)
        if BEST == 2:
            first = tl.min(tl.where(own == best, expert, 2**30), 0)
            best += tl.max(tl.where(expert == first, -float("inf"), own), 0)
        total = tl.where(group == index, best, total)
    found = tl.full(choice.shape, -float("inf"), tl.float32)
    for _ in range(USED):
        first = tl.min(tl.where(total == tl.max(total, 0), group, 2**30), 0)
        found = tl.where(group == first, choice, found)
        total = tl.where(group == first, -float("inf"), total)
    return found


@triton.jit
def _route(
    logits, factors, corrections, experts, weights, num_experts, weight_factor,
    EACH: tl.constexpr, IS_NORMED: tl.constexpr, HAS_SIGMOIDS: tl.constexpr, GROUPS: tl.constexpr,
    USED: tl.constexpr, BEST: tl.constexpr, LEAST_SUM: tl.constexpr, SIZE: tl.constexpr,
    SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token. Of equal choices that of the first expert counts as higher."""
    wait_for_kernels_before(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, SIZE)
    slot = tl.arange(0, SLOTS)
    is_expert = expert < num_experts
    own = logits + token * num_experts
    logit = tl.load(own + expert, mask=is_expert, other=-float("inf")).to(tl.float32)
    peak = tl.max(logit, 0)
    choice = logit
    if HAS_SIGMOIDS or GROUPS > 1:
        choice = _weight(logit, peak, HAS_SIGMOIDS)
        if corrections is not None:
            choice += tl.load(corrections + expert, mask=is_expert, other=0.0)
        choice = tl.where(is_expert, choice, -float("inf"))
    if GROUPS > 1:
        choice = _in_best_groups(choice, expert, num_experts // GROUPS, GROUPS, USED, BEST)
    chosen = tl.zeros((SLOTS,), tl.int32)
    for index in range(EACH):
        best = tl.max(choice, 0)
        # Where all are NaN none is the highest.
        first = tl.minimum(tl.min(tl.where(choice == best, expert, SIZE), 0), num_experts - 1)
        chosen = tl.where(slot == index, first, chosen)
        choice = tl.where(expert == first, -float("inf"), choice)
    mask = slot < EACH
    logit_of_chosen = tl.load(own + chosen, mask=mask, other=-float("inf")).to(tl.float32)
    weight = _weight(logit_of_chosen, peak, HAS_SIGMOIDS)
    if IS_NORMED:
        weight /= tl.sum(weight, 0) + LEAST_SUM
    elif not HAS_SIGMOIDS:
        weight /= tl.sum(_weight(logit, peak, HAS_SIGMOIDS), 0)
    weight *= weight_factor
    if factors is not None:
        weight *= tl.load(factors + chosen, mask=mask, other=0.0)
    tl.store(experts + token * EACH + slot, chosen, mask=mask)
    tl.store(weights + token * EACH + slot, weight, mask=mask)
