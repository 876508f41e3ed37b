"""Which experts compute a token, and tiles of rows of one expert, without a word to the host.

A row is a pair of a token and one of its experts, numbered as `Routes` has them. With few tokens
each row is a tile of its own: they rarely share an expert, and sorting takes longer than reading a
weight twice from the cache. With more, rows are sorted by expert, and each expert's fill tiles of
their own, the last of which may have fewer: as in vLLM's `moe_align_block_size`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import ceil_div, next_power_of_2

# The most tokens whose rows are tiles of their own.
MAX_PAIRED_TOKENS = 8
# The left operand of a product has so many rows at least.
FEW_ROWS, MANY_ROWS = 16, 64


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
    flat, device = experts.flatten(), experts.device
    num_rows = len(flat)
    numbers = torch.arange(num_rows, dtype=torch.int32, device=device)
    if len(experts) <= MAX_PAIRED_TOKENS:
        return Tiles(FEW_ROWS, numbers, flat, numbers, torch.ones_like(numbers))
    rows = MANY_ROWS if num_rows > FEW_ROWS * num_experts else FEW_ROWS
    order = flat.sort(stable=True).indices.int()
    counts = torch.zeros(num_experts, dtype=torch.int32, device=device)
    counts.scatter_add_(0, flat.long(), torch.ones_like(flat))
    starts = counts.cumsum(0) - counts
    tiles_each = (counts + (rows - 1)).div(rows, rounding_mode="floor")
    ends = tiles_each.cumsum(0)
    # As many as there can be; the host does not know how many there are.
    num_tiles = min(num_rows, ceil_div(num_rows, rows) + min(num_experts, num_rows))
    tile = torch.arange(num_tiles, device=device)
    expert = torch.searchsorted(ends, tile, right=True).clamp_(max=num_experts - 1)
    done = (tile - (ends - tiles_each)[expert]) * rows
    left = (counts[expert] - done).clamp_(0, rows)
    return Tiles(rows, order, expert.int(), (starts[expert] + done).int(), left.int())


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
