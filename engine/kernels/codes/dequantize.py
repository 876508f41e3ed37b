"""Writes the numbers that a weight's codes stand for."""

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.codes.groups import scaled_numbers
from penstock.engine.kernels.codes.weight import CodedWeight
from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import ceil_div

# Outputs and bytes of a program.
_OUTPUTS, _SIZE = 16, 128


def dequantize(weight: CodedWeight, first: int, out: Tensor) -> None:
    """Writes rows [first, first + len(out)) of W to `out`: (rows, columns) of the model's type."""
    rows, columns = out.shape
    row_bytes = weight.codes.shape[1]
    _dequantize[(ceil_div(row_bytes, _SIZE), ceil_div(rows, _OUTPUTS))](
        weight.codes, weight.scales, weight.zeros, out, first, rows, columns, row_bytes,
        weight.scales.shape[1],
        **weight.constants, OUTPUTS=_OUTPUTS, SIZE=_SIZE, num_warps=4, **overlapped(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "rows"])
def _dequantize(
    codes, scales, zeros, out, first, rows, columns, row_bytes, scale_stride,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, LEVELS: tl.constexpr, RUN: tl.constexpr,
    OUTPUTS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SIZE bytes of OUTPUTS rows."""
    wait_for_kernels_before(PDL)
    row = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row = row < rows
    start = tl.program_id(0) * SIZE
    byte = start + tl.arange(0, SIZE)
    mask = is_row[:, None] & (byte < row_bytes)[None, :]
    where = (first + row).to(tl.int64)[:, None] * row_bytes + byte[None, :]
    w = tl.load(codes + where, mask=mask, other=0)
    low, high = scaled_numbers(
        w, start, scales, zeros, scale_stride, columns, first + row, is_row, out.dtype.element_ty,
        True, BITS, GROUP_SIZE, LEVELS, RUN,
    )  # fmt: skip
    target = out + row.to(tl.int64)[:, None] * columns
    column = byte
    if BITS == 4:
        column = byte // RUN * (2 * RUN) + byte % RUN
        beyond = is_row[:, None] & (column + RUN < columns)[None, :]
        tl.store(target + column[None, :] + RUN, high, mask=beyond)
    tl.store(target + column[None, :], low, mask=is_row[:, None] & (column < columns)[None, :])
