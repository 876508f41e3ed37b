"""RMSNorm, also fused with the preceding residual addition, and the embedding's gather."""

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import next_power_of_2


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    normed: Tensor,
    *,
    post: Tensor | None = None,
    scalar: Tensor | None = None,
) -> None:
    """residual += x; normed = residual / rms(residual) * weight. All (T, hidden) but weight.

    weight: None leaves normed as it is. post: of a norm of x itself, before it is added; None where
    there is none. scalar: (1,), what the sum is multiplied by, or None. The sum is rounded to the
    residual's type before the norm, as with separate operators.
    Source: Zhang and Sennrich 2019 (arXiv:1910.07467).
    """
    num_tokens, hidden = residual.shape
    _add_rms_norm[(num_tokens,)](
        x, residual, post, scalar, weight, normed, eps, hidden,
        SIZE=next_power_of_2(hidden), num_warps=_num_warps(hidden), **overlapped(),
    )  # fmt: skip


def embed(
    token_ids: Tensor,
    embedding: Tensor,
    residual: Tensor,
    multiplier: float = 1.0,
    *,
    first_id: int | None = None,
) -> None:
    """residual[i] = embedding[token_ids[i]] * multiplier: (T, hidden). first_id: of a part of the
    vocabulary, which the embedding is; the rows of ids outside of it become zeros."""
    num_tokens, hidden = residual.shape
    _embed[(num_tokens,)](
        token_ids, embedding, residual, hidden, None if multiplier == 1 else multiplier,
        first_id, len(embedding),
        SIZE=next_power_of_2(hidden), num_warps=_num_warps(hidden), **overlapped(),
    )  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, eps: float, normed: Tensor) -> None:
    """normed = x / rms(x) * weight: (T, hidden), or columns of wider tensors; they may be the
    same."""
    num_tokens, hidden = x.shape
    _rms_norm[(num_tokens,)](
        x, weight, normed, eps, hidden, x.stride(0), normed.stride(0),
        SIZE=next_power_of_2(hidden), num_warps=_num_warps(hidden), **overlapped(),
    )  # fmt: skip


def _num_warps(hidden: int) -> int:
    """Eight elements per thread: 16 bytes of bfloat16."""
    return max(1, min(16, next_power_of_2(hidden) // 256))


@triton.jit
def _normed(x, weight, eps, hidden):
    """x: a row in float32. Rounded to the weight's type before it is multiplied by the weight."""
    scale = tl.rsqrt(tl.sum(x * x) / hidden + eps)
    return (x * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)


@triton.jit
def _add_rms_norm(
    x, residual, post, scalar, weight, normed, eps, hidden, SIZE: tl.constexpr, PDL: tl.constexpr
):
    wait_for_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64) * hidden
    column = tl.arange(0, SIZE)
    mask = column < hidden
    kind = residual.dtype.element_ty
    total = tl.load(residual + row + column, mask=mask, other=0.0).to(tl.float32)
    change = tl.load(x + row + column, mask=mask, other=0.0).to(tl.float32)
    if post is not None:
        p = tl.load(post + column, mask=mask, other=0.0)
        change = _normed(change, p, eps, hidden).to(kind).to(tl.float32)
    total += change
    if scalar is not None:
        total = total.to(kind).to(tl.float32) * tl.load(scalar).to(tl.float32)
    total = total.to(kind)
    tl.store(residual + row + column, total, mask=mask)
    if weight is not None:
        w = tl.load(weight + column, mask=mask, other=0.0)
        result = _normed(total.to(tl.float32), w, eps, hidden).to(kind)
        tl.store(normed + row + column, result, mask=mask)


@triton.jit
def _rms_norm(
    x, weight, normed, eps, hidden, x_stride, stride, SIZE: tl.constexpr, PDL: tl.constexpr
):
    wait_for_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    mask = column < hidden
    kind = normed.dtype.element_ty
    values = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=mask, other=0.0)
    tl.store(normed + row * stride + column, _normed(values, w, eps, hidden).to(kind), mask=mask)


@triton.jit
def _embed(
    token_ids, embedding, residual, hidden, multiplier, first_id, num_ids,
    SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_kernels_before(PDL)
    token = tl.program_id(0)
    column = tl.arange(0, SIZE)
    mask = column < hidden
    token_id = tl.load(token_ids + token).to(tl.int64)
    is_own = mask
    if first_id is not None:
        token_id -= first_id
        row = token_id + tl.zeros([SIZE], tl.int64)  # the interpreter takes no scalar for a mask
        is_own = mask & (row >= 0) & (row < num_ids)
    values = tl.load(embedding + token_id * hidden + column, mask=is_own, other=0.0)
    if multiplier is not None:
        values = (values.to(tl.float32) * multiplier).to(residual.dtype.element_ty)
    tl.store(residual + token.to(tl.int64) * hidden + column, values, mask=mask)
