"""Linear layers for few rows whose weights are codes of 8 or 4 bits, with a scale for each group.

As `penstock.engine.kernels.linear`, with half or a quarter of the bytes: codes become numbers of
the model's type in registers, and each group's product is a float32 that is multiplied by its
scale. Activations keep their type (W8A16, W4A16).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.codes.numbers import load_groups, numbers
from penstock.engine.kernels.codes.weight import CodedWeight
from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.linear import (
    FEW_ROWS,
    MAX_ROWS,
    Scaled,
    as_scaled,
    load_squares,
    norm_arguments,
    scaled_like,
    store_outputs,
)
from penstock.engine.kernels.sizes import ceil_div


class CodedTile(NamedTuple):
    """A program's outputs, and stages of which one less is in flight."""

    outputs: int
    stages: int


# A stage has 8 KiB of codes, so that 24 are in flight for each of the two or more programs of a
# multiprocessor: see `penstock.engine.kernels.linear`. All divide the columns alike.
TILE = CodedTile(outputs=32, stages=4)
_STAGE_COLUMNS = 256


def skinny_grouped_linear(
    x: Tensor | Scaled,
    weight: CodedWeight,
    out: Tensor,
    *,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
    following: Tensor | None = None,
    tile: CodedTile = TILE,
) -> Scaled | None:
    """out = x' W^T + bias + residual: see `skinny_linear`, whose arguments these are."""
    values, *_ = scaled = as_scaled(x)
    num_rows, columns = values.shape
    outputs, row_bytes = out.shape[1], weight.codes.shape[1]
    warps = _STAGE_COLUMNS // weight.run
    chunk = warps * weight.run
    assert columns == weight.columns, (values.shape, weight.columns)
    assert residual is None or residual.stride(0) == out.stride(0), residual.stride()
    assert num_rows <= MAX_ROWS and not (is_gated and (bias is not None or residual is not None))
    grid = ceil_div(outputs, tile.outputs)
    next_input = scaled_like(out, following, grid)
    _skinny_grouped[(grid,)](
        values, weight.codes, weight.scales, weight.zeros, bias, residual, out, num_rows, columns,
        outputs, row_bytes, weight.scales.shape[1], out.stride(0),
        **norm_arguments(scaled, eps, following, next_input), **weight.constants,
        IS_GATED=is_gated, ROWS=FEW_ROWS if num_rows <= FEW_ROWS else MAX_ROWS,
        OUTPUTS=tile.outputs, WARPS=warps, STAGES=min(tile.stages, ceil_div(row_bytes, chunk) + 1),
        num_warps=warps, **overlapped(),
    )  # fmt: skip
    return next_input


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _skinny_grouped(
    x, codes, scales, zeros, bias, residual, out, num_rows, columns, outputs, row_bytes,
    scale_stride, out_stride, squares, num_parts, eps, following, values, next_squares,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, LEVELS: tl.constexpr, RUN: tl.constexpr,
    IS_GATED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WARPS: tl.constexpr,
    STAGES: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of all rows. Each warp multiplies its own run of bytes of a chunk."""
    wait_for_kernels_before(PDL)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < outputs
    is_row = (tl.arange(0, ROWS) < num_rows)[None, :, None]
    part = tl.arange(0, WARPS)
    inside = tl.arange(0, RUN)
    codes_row = codes + output.to(tl.int64)[None, :, None] * row_bytes
    x_row = x + tl.arange(0, ROWS)[None, :, None] * columns
    acc = tl.zeros((WARPS, OUTPUTS, ROWS), tl.float32)
    acc_up = acc
    square = load_squares(squares, num_rows, num_parts, ROWS, PARTS)
    for start in tl.range(0, row_bytes, WARPS * RUN, num_stages=STAGES):
        run = start + part * RUN
        byte = (run[:, None] + inside[None, :])[:, None, :]
        mask = is_output[None, :, None] & (byte < row_bytes)
        w = tl.load(codes_row + byte, mask=mask, other=0)
        first_column = run * (8 // BITS)
        column = (first_column[:, None] + inside[None, :])[:, None, :]
        a = tl.load(x_row + column, mask=is_row & (column < columns), other=0.0)
        b = a
        if BITS == 4:
            column += RUN
            b = tl.load(x_row + column, mask=is_row & (column < columns), other=0.0)
        acc = _add_products(
            w, a, b, acc, scales, zeros, scale_stride, first_column, columns, output, is_output, 0,
            BITS, GROUP_SIZE, LEVELS, RUN,
        )  # fmt: skip
        if IS_GATED:
            u = tl.load(codes_row + outputs.to(tl.int64) * row_bytes + byte, mask=mask, other=0)
            acc_up = _add_products(
                u, a, b, acc_up, scales, zeros, scale_stride, first_column, columns, output,
                is_output, outputs, BITS, GROUP_SIZE, LEVELS, RUN,
            )  # fmt: skip
    store_outputs(
        tl.sum(acc, 0), tl.sum(acc_up, 0), square, x, squares, bias, residual, out, output,
        num_rows, columns, outputs, out_stride, eps, following, values, next_squares, IS_GATED,
    )  # fmt: skip


@triton.jit
def _add_products(
    w, a, b, acc, scales, zeros, scale_stride, column, columns, output, is_output, first,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, LEVELS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """w: (warps, outputs, run) bytes. a, b: (warps, rows, run), b where bytes have two codes.

    column: (warps,), of the first code of each run. first: the row of the weight where outputs
    begin.
    """
    kind: tl.constexpr = a.dtype
    scale, scale_high = load_groups(
        scales + first, scale_stride, column, columns, output, is_output, BITS, GROUP_SIZE, RUN
    )
    low, high = numbers(w, kind, BITS, LEVELS)
    if zeros is not None:
        zero, zero_high = load_groups(
            zeros + first, scale_stride, column, columns, output, is_output, BITS, GROUP_SIZE, RUN
        )
        low = low - zero.to(kind)[:, :, None]
        if BITS == 4:
            high = high - zero_high.to(kind)[:, :, None]
    product = tl.dot(low, tl.permute(a, (0, 2, 1)), input_precision="ieee")
    if BITS == 8:
        acc += product * scale[:, :, None]
    elif GROUP_SIZE % (2 * RUN) == 0:
        both = tl.dot(high, tl.permute(b, (0, 2, 1)), product, input_precision="ieee")
        acc += both * scale[:, :, None]
    else:
        acc += product * scale[:, :, None]
        product = tl.dot(high, tl.permute(b, (0, 2, 1)), input_precision="ieee")
        acc += product * scale_high[:, :, None]
    return acc
