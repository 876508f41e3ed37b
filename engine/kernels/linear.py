"""Linear layers for a handful of rows, with what stands around them in a decode layer.

At batch 1 to 16 a matrix product is bound by reading the weight, and every launch beside it costs
as much as 6 MB of weights. So one kernel reads the weight once, deep ahead, and does the rest on
its way: the RMSNorm of its input (which is a scale per row: it can wait till the end), SiLU of
gate times up, the bias, and the residual addition.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.activation import silu
from engine.kernels.sizes import ceil_div, power_of_2_from

# The smallest row count that the matrix units take is the largest that this is meant for.
MAX_ROWS = 16
# Of a program: with four stages 24 KiB of the weight are on their way, and 24 of x, from L2.
# Twice the chunk would spill registers where there is a norm.
_OUTPUTS, _CHUNK, _STAGES = 16, 256, 4


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> None:
    """out = x' W^T + bias + residual, where x' is x, or its RMSNorm where `norm` is given.

    x: (T, columns), T at most MAX_ROWS. weight: (outputs, columns). out, residual: (T, outputs);
    they may be the same tensor. is_gated: weight is (2 * outputs, columns), the gate's rows first,
    and out = silu(gate) * up, without a bias or residual. Sums are float32.
    """
    num_rows, columns = x.shape
    outputs = out.shape[1]
    assert num_rows <= MAX_ROWS and not (is_gated and (bias is not None or residual is not None))
    _skinny[(ceil_div(outputs, _OUTPUTS),)](
        x,
        weight,
        x if norm is None else norm,
        x if bias is None else bias,
        out if residual is None else residual,
        out,
        num_rows,
        columns,
        outputs,
        eps,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        IS_GATED=is_gated,
        ROWS=MAX_ROWS,
        OUTPUTS=_OUTPUTS,
        CHUNK=max(16, min(_CHUNK, power_of_2_from(columns))),
        num_warps=4,
        num_stages=_STAGES,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _skinny(
    x,
    weight,
    norm,
    bias,
    residual,
    out,
    num_rows,
    columns,
    outputs,
    eps,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """OUTPUTS outputs of all rows. The weight stands left, so that its rows fill the units."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    is_output = output < outputs
    is_row = row < num_rows
    weight_row = weight + output.to(tl.int64)[:, None] * columns
    up_row = weight + (output + outputs).to(tl.int64)[:, None] * columns
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    acc_up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    for start in range(0, columns, CHUNK):
        column = start + tl.arange(0, CHUNK)
        is_column = column < columns
        mask = is_output[:, None] & is_column[None, :]
        w = tl.load(weight_row + column[None, :], mask=mask, other=0.0)
        part = x + row[:, None] * columns + column[None, :]
        a = tl.load(part, mask=is_row[:, None] & is_column[None, :], other=0.0)
        if HAS_NORM:
            wide = a.to(tl.float32)
            square += tl.sum(wide * wide, 1)
            scale = tl.load(norm + column, mask=is_column, other=0.0).to(tl.float32)
            a = (wide * scale[None, :]).to(a.dtype)
        a = tl.trans(a)
        acc = tl.dot(w, a, acc, input_precision="ieee")
        if IS_GATED:
            u = tl.load(up_row + column[None, :], mask=mask, other=0.0)
            acc_up = tl.dot(u, a, acc_up, input_precision="ieee")
    if HAS_NORM:
        scale = tl.rsqrt(square / columns + eps)[None, :]
        acc = acc * scale
        acc_up = acc_up * scale
    kind = out.dtype.element_ty
    mask = is_output[:, None] & is_row[None, :]
    target = row[None, :].to(tl.int64) * outputs + output[:, None]
    if IS_GATED:
        gate = silu(acc.to(x.dtype.element_ty).to(tl.float32))
        up = acc_up.to(x.dtype.element_ty).to(tl.float32)
        acc = gate.to(x.dtype.element_ty).to(tl.float32) * up
    if HAS_BIAS:
        acc += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        acc = acc.to(kind).to(tl.float32)
        acc += tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + target, acc.to(kind), mask=mask)
