"""Writes the numbers that a weight's codes stand for."""

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.codes.numbers import halves
from penstock.engine.kernels.codes.weight import CodedWeight
from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import ceil_div

# Outputs and bytes of a program.
_DEQUANTIZED = (16, 128)


def dequantize(weight: CodedWeight, first: int, out: Tensor) -> None:
    """Writes rows [first, first + len(out)) of W to `out`: (rows, columns) of the model's type."""
    rows, columns = out.shape
    row_bytes = weight.codes.shape[1]
    outputs, size = _DEQUANTIZED
    _dequantize[(ceil_div(row_bytes, size), ceil_div(rows, outputs))](
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        out,
        first,
        rows,
        columns,
        row_bytes,
        weight.scales.shape[1],
        BITS=weight.bits,
        GROUP_SIZE=weight.group_size,
        HAS_ZEROS=weight.zeros is not None,
        LEVELS=weight.levels,
        RUN=weight.run,
        OUTPUTS=outputs,
        SIZE=size,
        num_warps=4,
        **overlapped(),
    )


@triton.jit(do_not_specialize=["first", "rows"])
def _dequantize(
    codes,
    scales,
    zeros,
    out,
    first,
    rows,
    columns,
    row_bytes,
    scale_stride,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    LEVELS: tl.constexpr,
    RUN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """SIZE bytes of OUTPUTS rows."""
    wait_for_kernels_before(PDL)
    row = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS))[:, None]
    byte = (tl.program_id(0) * SIZE + tl.arange(0, SIZE))[None, :]
    is_row = row < rows
    output = first + row
    where = output.to(tl.int64) * row_bytes + byte
    w = tl.load(codes + where, mask=is_row & (byte < row_bytes), other=0)
    if BITS == 8:
        _store_numbers(
            w.to(tl.float32), scales, zeros, out, row, output, byte, is_row, columns, scale_stride,
            GROUP_SIZE, HAS_ZEROS,
        )  # fmt: skip
    else:
        low, high = halves(w, out.dtype.element_ty, LEVELS)
        column = byte // RUN * (2 * RUN) + byte % RUN
        _store_numbers(
            low, scales, zeros, out, row, output, column, is_row, columns, scale_stride,
            GROUP_SIZE, HAS_ZEROS,
        )  # fmt: skip
        _store_numbers(
            high, scales, zeros, out, row, output, column + RUN, is_row, columns, scale_stride,
            GROUP_SIZE, HAS_ZEROS,
        )  # fmt: skip


@triton.jit
def _store_numbers(
    numbers,
    scales,
    zeros,
    out,
    row,
    output,
    column,
    is_row,
    columns,
    scale_stride,
    GROUP_SIZE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):
    mask = is_row & (column < columns)
    group = column // GROUP_SIZE
    wide = numbers.to(tl.float32)
    if HAS_ZEROS:
        wide -= _of_one_group(zeros, scale_stride, group, output, mask)
    wide *= _of_one_group(scales, scale_stride, group, output, mask)
    tl.store(out + row.to(tl.int64) * columns + column, wide.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _of_one_group(table, stride, group, output, mask):
    """A scale or zero for each element, (outputs, columns)."""
    if table.dtype.element_ty == tl.int32:
        pair = (group // 2).to(tl.int64)
        both = tl.load(table + pair * stride + output, mask=mask, other=0)
        half = (both >> (group % 2 * 16)).to(tl.int16)
        found = half.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        found = tl.load(table + group.to(tl.int64) * stride + output, mask=mask, other=0.0)
    return found
