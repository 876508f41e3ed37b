"""activation(gate) * up of the feed-forward layer, where the activation is SiLU or GELU; and the
output layer's softcap."""

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import ceil_div

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
