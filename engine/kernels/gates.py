"""Gates that a token has: of attention, for each head of a query, and of a shared expert."""

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import ceil_div, next_power_of_2

_BLOCK = 1024


def without_gates(projected: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """Queries, keys and values next to each other, of a projection in which the gate of each head
    follows its query: (T, 2 * num_heads * head_dim + keys and values)."""
    num_tokens, columns = len(projected), projected.shape[1] - num_heads * head_dim
    out = projected.new_empty(num_tokens, columns)
    _without_gates[(num_tokens, ceil_div(columns, _BLOCK))](
        projected, out, columns,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK=_BLOCK, num_warps=4, **overlapped(),
    )  # fmt: skip
    return out


def apply_gates(projected: Tensor, out: Tensor) -> None:
    """out *= sigmoid(gate) of each head, in place. projected: as for `without_gates`. out: (T,
    num_heads, head_dim)."""
    num_tokens, num_heads, head_dim = out.shape
    _apply_gates[(num_tokens, ceil_div(num_heads * head_dim, _BLOCK))](
        projected, out, projected.shape[1],
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK=_BLOCK, num_warps=4, **overlapped(),
    )  # fmt: skip


def add_gated(x: Tensor, weight: Tensor, change: Tensor, out: Tensor) -> None:
    """out += sigmoid(x . weight) * change: (T, hidden). weight: (1, hidden)."""
    num_tokens, hidden = out.shape
    _add_gated[(num_tokens,)](
        x, weight, change, out, hidden,
        SIZE=next_power_of_2(hidden), num_warps=4, **overlapped(),
    )  # fmt: skip


@triton.jit
def _without_gates(
    projected, out, columns,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_kernels_before(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    # As many gates as there are queries up to here.
    gates = tl.minimum(column // HEAD_DIM, NUM_HEADS) * HEAD_DIM
    row = projected + token * (columns + NUM_HEADS * HEAD_DIM)
    tl.store(out + token * columns + column, tl.load(row + column + gates, mask=mask), mask=mask)


@triton.jit
def _apply_gates(
    projected, out, columns,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_kernels_before(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < NUM_HEADS * HEAD_DIM
    head = column // HEAD_DIM
    gate = projected + token * columns + column + (head + 1) * HEAD_DIM
    weight = 1.0 / (1.0 + tl.exp(-tl.load(gate, mask=mask, other=0.0).to(tl.float32)))
    place = out + token * (NUM_HEADS * HEAD_DIM) + column
    kind = out.dtype.element_ty
    # Rounded in between, as two separate operators would.
    x = tl.load(place, mask=mask, other=0.0).to(tl.float32) * weight.to(kind).to(tl.float32)
    tl.store(place, x.to(kind), mask=mask)


@triton.jit
def _add_gated(x, weight, change, out, hidden, SIZE: tl.constexpr, PDL: tl.constexpr):
    wait_for_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64) * hidden
    column = tl.arange(0, SIZE)
    mask = column < hidden
    kind = out.dtype.element_ty
    states = tl.load(x + row + column, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-tl.sum(states * w, 0)))
    added = tl.load(change + row + column, mask=mask, other=0.0).to(tl.float32) * gate
    before = tl.load(out + row + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + column, (before + added).to(kind), mask=mask)
