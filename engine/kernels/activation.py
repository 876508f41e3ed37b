"""activation(gate) * up of the feed-forward layer, where the activation is SiLU or GELU; the gates
that a token has, of attention for each head and of a shared expert; the output layer's softcap."""

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import ceil_div, next_power_of_2

_BLOCK = 1024


def silu_mul(gate_up: Tensor, out: Tensor, *, is_gelu: bool = False) -> None:
    """out = silu(gate) * up, of gate_up (T, 2 * mlp) with the gate first: (T, mlp).

    is_gelu: GELU by tanh in its place. Source: Shazeer 2020, SwiGLU and GEGLU (arXiv:2002.05202).
    """
    num_tokens, mlp = out.shape
    grid = (num_tokens, ceil_div(mlp, _BLOCK))
    _silu_mul[grid](gate_up, out, mlp, IS_GELU=is_gelu, BLOCK=_BLOCK, num_warps=4, **overlapped())


def softcap(logits: Tensor, cap: float) -> None:
    """logits = cap * tanh(logits / cap), in place: (S, vocab_size), of any type.

    Source: Gemma Team 2024, section 2 (arXiv:2408.00118).
    """
    num_rows, vocab_size = logits.shape
    grid = (num_rows, ceil_div(vocab_size, _BLOCK))
    _softcap[grid](logits, vocab_size, cap, BLOCK=_BLOCK, num_warps=4, **overlapped())


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    """By tanh: x times a sigmoid too, as (1 + tanh(y / 2)) / 2 = 1 / (1 + exp(-y))."""
    y = -x * (1.5957691216057308 + 0.07135481627159544 * x * x)
    return x / (1.0 + tl.exp(tl.minimum(y, 80.0)))  # more would only overflow


@triton.jit
def _silu_mul(gate_up, out, mlp, IS_GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < mlp
    gate = tl.load(gate_up + row * 2 * mlp + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * mlp + mlp + column, mask=mask, other=0.0)
    kind = out.dtype.element_ty
    # Rounded in between, as two separate operators would.
    activated = gelu(gate) if IS_GELU else silu(gate)
    active = activated.to(kind).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * mlp + column, active.to(kind), mask=mask)


@triton.jit
def _softcap(logits, vocab_size, cap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < vocab_size
    place = logits + row * vocab_size + column
    x = tl.load(place, mask=mask, other=0.0).to(tl.float32) / cap
    # tanh, which is 1 where the exponential is infinite.
    capped = cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * x)))
    tl.store(place, capped.to(logits.dtype.element_ty), mask=mask)


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
