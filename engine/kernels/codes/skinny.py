"""Linear layers for few rows whose weights are codes of 8 or 4 bits, with a scale for each group.

As `penstock.engine.kernels.linear`, with half or a quarter of the bytes: codes become numbers of
the model's type in registers, and each group's product is a float32 that is multiplied by its
scale. Activations keep their type (W8A16, W4A16).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.codes.groups import of_groups
from penstock.engine.kernels.codes.numbers import halves, whole
from penstock.engine.kernels.codes.weight import CodedWeight
from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.linear import (
    FETCHING,
    MAX_ROWS,
    ahead_of_row,
    fetch_ahead,
    squares,
    store_outputs,
)
from penstock.engine.kernels.sizes import ceil_div

_FEW_ROWS = 8


class CodedTile(NamedTuple):
    """A program's outputs, and stages of which one less is in flight."""

    outputs: int
    stages: int


# A stage has 8 KiB of codes, so that 24 are in flight for each of the two or more programs of a
# multiprocessor: see `penstock.engine.kernels.linear`. All divide the columns alike.
TILE = CodedTile(outputs=32, stages=4)
_STAGE_COLUMNS = 256


def skinny_grouped_linear(
    x: Tensor,
    weight: CodedWeight,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
    tile: CodedTile = TILE,
) -> None:
    """out = x' W^T + bias + residual: see `skinny_linear`, whose arguments these are."""
    num_rows, columns = x.shape
    outputs = out.shape[1]
    warps = _STAGE_COLUMNS // weight.run
    assert columns == weight.columns, (x.shape, weight.columns)
    assert residual is None or residual.stride(0) == out.stride(0), residual.stride()
    assert num_rows <= MAX_ROWS and not (is_gated and (bias is not None or residual is not None))
    row_bytes = weight.codes.shape[1]
    chunk = warps * weight.run
    _skinny_grouped[(ceil_div(outputs, tile.outputs),)](
        x,
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        x if norm is None else norm,
        x if bias is None else bias,
        out if residual is None else residual,
        out,
        num_rows,
        columns,
        outputs,
        row_bytes,
        weight.scales.shape[1],
        out.stride(0),
        eps,
        ahead_of_row(weight.codes, row_bytes, tile.outputs * (1 + is_gated), chunk),
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        # Before its norm, a row times the norm's weight may exceed what float16 holds.
        NORM_FIRST=norm is not None and x.dtype is torch.float16,
        IS_GATED=is_gated,
        BITS=weight.bits,
        GROUP_SIZE=weight.group_size,
        HAS_ZEROS=weight.zeros is not None,
        LEVELS=weight.levels,
        RUN=weight.run,
        ROWS=_FEW_ROWS if num_rows <= _FEW_ROWS else MAX_ROWS,
        OUTPUTS=tile.outputs,
        WARPS=warps,
        STAGES=min(tile.stages, ceil_div(row_bytes, chunk) + 1),
        FETCHING=FETCHING,
        num_warps=warps,
        **overlapped(),
    )


@triton.jit
def _inputs(
    x_row,
    norm,
    column,
    is_row,
    columns,
    inverse,
    square,
    HAS_NORM: tl.constexpr,
    NORM_FIRST: tl.constexpr,
):
    """Of (warps, 1, run) columns: x, times its norm's weight, and the sum of squares so far."""
    is_column = column < columns
    a = tl.load(x_row + column, mask=is_row[None, :, None] & is_column, other=0.0)
    if HAS_NORM:
        wide = a.to(tl.float32)
        scale = tl.load(norm + column, mask=is_column, other=0.0).to(tl.float32)
        if NORM_FIRST:
            wide = wide * inverse[None, :, None]
        else:
            square += squares(wide)
        a = (wide * scale).to(a.dtype)
    return a, square


@triton.jit(do_not_specialize=["num_rows", "ahead"])
def _skinny_grouped(
    x,
    codes,
    scales,
    zeros,
    norm,
    bias,
    residual,
    out,
    num_rows,
    columns,
    outputs,
    row_bytes,
    scale_stride,
    out_stride,
    eps,
    ahead,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    IS_GATED: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    LEVELS: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    FETCHING: tl.constexpr,
    PDL: tl.constexpr,
):
    """OUTPUTS outputs of all rows. Each warp multiplies its own run of bytes of a chunk."""
    if PDL:
        first = tl.program_id(0) * OUTPUTS
        soon = tl.where(tl.program_id(0) < FETCHING, ahead, 0)
        fetch_ahead(codes, first, outputs, row_bytes, soon, OUTPUTS)
        if IS_GATED:
            fetch_ahead(codes, first + outputs, 2 * outputs, row_bytes, soon, OUTPUTS)
    wait_for_kernels_before(PDL)
    kind: tl.constexpr = x.dtype.element_ty
    PER_BYTE: tl.constexpr = 8 // BITS
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    is_output = output < outputs
    is_row = row < num_rows
    part = tl.arange(0, WARPS)
    inside = tl.arange(0, RUN)
    codes_row = codes + output.to(tl.int64)[None, :, None] * row_bytes
    x_row = x + row[None, :, None] * columns
    acc = tl.zeros((WARPS, OUTPUTS, ROWS), tl.float32)
    acc_up = acc
    # Of eight neighbouring columns, so that a thread adds up its own.
    square = tl.zeros((WARPS, ROWS, RUN // 8), tl.float32)
    inverse = tl.full((ROWS,), 1.0, tl.float32)
    if NORM_FIRST:
        for start in range(0, row_bytes * PER_BYTE, WARPS * RUN):
            column = (start + part[:, None] * RUN + inside[None, :])[:, None, :]
            mask = is_row[None, :, None] & (column < columns)
            square += squares(tl.load(x_row + column, mask=mask, other=0.0).to(tl.float32))
        inverse = tl.rsqrt(tl.sum(tl.sum(square, 2), 0) / columns + eps)
    for start in tl.range(0, row_bytes, WARPS * RUN, num_stages=STAGES):
        run = start + part * RUN
        byte = (run[:, None] + inside[None, :])[:, None, :]
        mask = is_output[None, :, None] & (byte < row_bytes)
        w = tl.load(codes_row + byte, mask=mask, other=0)
        first_column = run * PER_BYTE
        a, square = _inputs(
            x_row, norm, (first_column[:, None] + inside[None, :])[:, None, :], is_row, columns,
            inverse, square, HAS_NORM, NORM_FIRST,
        )  # fmt: skip
        b = a
        if BITS == 4:
            b, square = _inputs(
                x_row, norm, (first_column[:, None] + RUN + inside[None, :])[:, None, :], is_row,
                columns, inverse, square, HAS_NORM, NORM_FIRST,
            )  # fmt: skip
        acc = _add_products(
            w, a, b, acc, scales, zeros, scale_stride, first_column, columns, output, is_output,
            kind, BITS, GROUP_SIZE, HAS_ZEROS, LEVELS, RUN,
        )  # fmt: skip
        if IS_GATED:
            u = tl.load(codes_row + outputs.to(tl.int64) * row_bytes + byte, mask=mask, other=0)
            acc_up = _add_products(
                u, a, b, acc_up, scales + outputs, zeros + outputs, scale_stride, first_column,
                columns, output, is_output, kind, BITS, GROUP_SIZE, HAS_ZEROS, LEVELS, RUN,
            )  # fmt: skip
    total = tl.sum(acc, 0)
    total_up = tl.sum(acc_up, 0)
    if HAS_NORM and not NORM_FIRST:
        scale = tl.rsqrt(tl.sum(tl.sum(square, 2), 0) / columns + eps)[None, :]
        total = total * scale
        total_up = total_up * scale
    store_outputs(
        total, total_up, x, bias, residual, out, output, row, outputs, out_stride,
        num_rows, HAS_BIAS, HAS_RESIDUAL, IS_GATED,
    )  # fmt: skip


@triton.jit
def _add_products(
    w,
    a,
    b,
    acc,
    scales,
    zeros,
    scale_stride,
    column,
    columns,
    output,
    is_output,
    kind: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    LEVELS: tl.constexpr,
    RUN: tl.constexpr,
):
    """w: (warps, outputs, run) bytes. a, b: (warps, rows, run), b where bytes have two codes.

    column: (warps,), of the first code of each run.
    """
    scale, scale_high = of_groups(
        scales, scale_stride, column, columns, output, is_output, BITS, GROUP_SIZE, RUN
    )
    if HAS_ZEROS:
        zero, zero_high = of_groups(
            zeros, scale_stride, column, columns, output, is_output, BITS, GROUP_SIZE, RUN
        )
    if BITS == 8:
        numbers = whole(w, kind)
        if HAS_ZEROS:
            numbers = numbers - zero.to(kind)[:, :, None]
        acc += _product(numbers, a) * scale[:, :, None]
    else:
        low, high = halves(w, kind, LEVELS)
        if GROUP_SIZE % (2 * RUN) == 0:
            if HAS_ZEROS:
                low = low - zero.to(kind)[:, :, None]
                high = high - zero.to(kind)[:, :, None]
            both = tl.dot(high, tl.permute(b, (0, 2, 1)), _product(low, a), input_precision="ieee")
            acc += both * scale[:, :, None]
        else:
            if HAS_ZEROS:
                low = low - zero.to(kind)[:, :, None]
                high = high - zero_high.to(kind)[:, :, None]
            acc += _product(low, a) * scale[:, :, None]
            acc += _product(high, b) * scale_high[:, :, None]
    return acc


@triton.jit
def _product(w, a):
    return tl.dot(w, tl.permute(a, (0, 2, 1)), input_precision="ieee")
