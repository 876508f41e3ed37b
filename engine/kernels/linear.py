"""Linear layers for few rows, fused with what surrounds them in a decode layer.

At batch 1 to 16 a matrix product is bound by reading the weight, and every further launch costs as
much as reading 6 MB of weights. So one kernel reads the weight once, far ahead, and also computes
SiLU(gate) * up, the bias, the residual addition, and what the next product needs of its RMSNorm.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.activation import silu
from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import NUM_SMS, ceil_div, max_shared_bytes, next_power_of_2

# The largest row count it is meant for: twice the smallest that the matrix units take.
MAX_ROWS = 16
FEW_ROWS = 8


class Tile(NamedTuple):
    """A program's outputs, and the columns that it reads at a time; stages of these in flight."""

    outputs: int
    chunk: int
    stages: int
    warps: int


# Weight rows of a program, those of gate and up together, where there is one for every
# multiprocessor. Of the tiles that were timed on an H200, `tile_of` chooses those with which a step
# of Llama-3.1-8B and of Qwen3-0.6B is fastest; loadtest/LOG.md has the others.
_WEIGHT_ROWS = 32
# Bytes of each row that are read at a time, of long rows and of short ones.
_LONG_CHUNK, _SHORT_CHUNK, _SHORT_ROW = 1024, 512, 2048


class Scaled(NamedTuple):
    """Rows of which a norm is half computed: what is left is a factor for each row, which a product
    applies to its sums. So its loop has nothing to do for the norm.

    values: (T, columns), the rows times the norm's weight. squares: (T, parts) float32, of each
    part of a row the sum of the squares before.
    """

    values: Tensor
    squares: Tensor


def skinny_linear(
    x: Tensor | Scaled,
    weight: Tensor,
    out: Tensor,
    *,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
    following: Tensor | None = None,
    tile: Tile | None = None,
) -> Scaled | None:
    """out = x' W^T + bias + residual, where x' is x, or what its norm gives.

    x: (T, columns), T at most MAX_ROWS. weight: (outputs, columns). out, residual: (T, outputs),
    or columns of a wider tensor; they may be the same. is_gated: weight is (2 * outputs, columns),
    the gate's rows first, and out = silu(gate) * up, without a bias or residual. Sums are float32.
    eps: of x's norm. following: the weight of a norm of out, which is then returned as far as it
    can be computed here. tile: by default one that gives a row the same bits whatever the others
    are.
    """
    values, *_ = scaled = as_scaled(x)
    num_rows, columns = values.shape
    outputs = out.shape[1]
    tile = tile or tile_of(outputs, columns, num_rows, values.element_size(), is_gated=is_gated)
    chunk = max(16 * tile.warps, min(tile.chunk, next_power_of_2(columns)))
    assert residual is None or residual.stride(0) == out.stride(0), residual.stride()
    assert num_rows <= MAX_ROWS and not (is_gated and (bias is not None or residual is not None))
    # The left operand of a product has 16 rows at least: these, or the weight's.
    rows = FEW_ROWS if num_rows <= FEW_ROWS and tile.outputs >= 16 else MAX_ROWS
    # No more than there are chunks: shared memory decides how many programs fit.
    num_stages = min(tile.stages, ceil_div(columns, chunk) + 1)
    grid = ceil_div(outputs, tile.outputs)
    next_input = scaled_like(out, following, grid)
    _skinny[(grid,)](
        values, weight, bias, residual, out, num_rows, columns, outputs, out.stride(0),
        **norm_arguments(scaled, eps, following, next_input),
        IS_GATED=is_gated, ROWS=rows, OUTPUTS=tile.outputs, CHUNK=chunk, WARPS=tile.warps,
        num_warps=tile.warps, num_stages=num_stages, **overlapped(),
    )  # fmt: skip
    return next_input


def as_scaled(x: Tensor | Scaled) -> tuple[Tensor, Tensor | None]:
    """Values, and squares if there are some."""
    return x if isinstance(x, Scaled) else (x, None)


def scaled_like(out: Tensor, following: Tensor | None, num_parts: int) -> Scaled | None:
    """For what a product adds for the norm that follows."""
    if following is None:
        return None
    squares = torch.empty(len(out), num_parts, dtype=torch.float32, device=out.device)
    return Scaled(torch.empty(out.shape, dtype=out.dtype, device=out.device), squares)


def norm_arguments(
    x: tuple[Tensor, Tensor | None], eps: float, following: Tensor | None, scaled: Scaled | None
) -> dict[str, Any]:
    """Of the norm before a product, and of that which follows."""
    squares, num_parts = x[1], 1 if x[1] is None else x[1].shape[1]
    values, next_squares = scaled or (None, None)
    return {
        "squares": squares, "num_parts": num_parts, "PARTS": next_power_of_2(num_parts), "eps": eps,
        "following": following, "values": values, "next_squares": next_squares,
    }  # fmt: skip


def tile_of(
    outputs: int, columns: int, num_rows: int, itemsize: int, *, is_gated: bool = False
) -> Tile:
    """The fastest, where all rows' sums are the same whatever their number: the columns are divided
    by the layer's shape alone."""
    is_short = columns * itemsize <= _SHORT_ROW
    size = _SHORT_CHUNK if is_short or is_gated else _LONG_CHUNK
    height, warps = _WEIGHT_ROWS // 2, 2
    stages = 6 if is_short else 4
    rows = FEW_ROWS if num_rows <= FEW_ROWS else MAX_ROWS
    if not is_gated:
        if ceil_div(outputs, height) <= NUM_SMS:
            size, stages, warps = _LONG_CHUNK, 6, 4
        elif _evenness(outputs, 2 * height) >= 0.9 * _evenness(outputs, height):
            height *= 2
        if rows == MAX_ROWS and ceil_div(outputs, height) > NUM_SMS:
            stages -= 1  # for the next program, which is behind it
    stage_bytes = size * (height * (1 + is_gated) + rows)
    most = max_shared_bytes() // stage_bytes + 1  # one of them is not in shared memory
    return Tile(height, size // itemsize, min(stages, most), warps)


def _evenness(outputs: int, height: int) -> float:
    """The share of the multiprocessors that tiles of this height occupy on average."""
    programs = ceil_div(outputs, height)
    return programs / (NUM_SMS * ceil_div(programs, NUM_SMS))


@triton.jit
def load_squares(squares, num_rows, num_parts, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """(PARTS, ROWS), before a loop that hides the wait for them; zeros without a norm."""
    loaded = tl.zeros((PARTS, ROWS), tl.float32)
    if squares is not None:
        part, row = tl.arange(0, PARTS)[:, None], tl.arange(0, ROWS)[None, :]
        mask = (part < num_parts) & (row < num_rows)
        loaded = tl.load(squares + row * num_parts + part, mask=mask, other=0.0)
    return loaded


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _skinny(
    x, weight, bias, residual, out, num_rows, columns, outputs, out_stride,
    squares, num_parts, eps, following, values, next_squares,
    IS_GATED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, CHUNK: tl.constexpr,
    WARPS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of all rows. Each warp multiplies its own columns of a chunk, so that the
    weight is read from shared memory once. What has 16 rows at least is the left operand."""
    wait_for_kernels_before(PDL)
    PART: tl.constexpr = CHUNK // WARPS
    IS_LEFT: tl.constexpr = OUTPUTS >= 16
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < outputs
    is_row = tl.arange(0, ROWS) < num_rows
    offset = tl.arange(0, WARPS)[:, None] * PART + tl.arange(0, PART)[None, :]
    weight_row = weight + output.to(tl.int64)[None, :, None] * columns
    up_row = weight + (output + outputs).to(tl.int64)[None, :, None] * columns
    x_row = x + tl.arange(0, ROWS)[None, :, None] * columns
    acc = tl.zeros((WARPS, OUTPUTS, ROWS) if IS_LEFT else (WARPS, ROWS, OUTPUTS), tl.float32)
    acc_up = acc
    square = load_squares(squares, num_rows, num_parts, ROWS, PARTS)
    for start in range(0, columns, CHUNK):
        column = (start + offset)[:, None, :]
        is_column = column < columns
        mask = is_output[None, :, None] & is_column
        w = tl.load(weight_row + column, mask=mask, other=0.0)
        a = tl.load(x_row + column, mask=is_row[None, :, None] & is_column, other=0.0)
        acc = _add_product(w, a, acc, IS_LEFT)
        if IS_GATED:
            u = tl.load(up_row + column, mask=mask, other=0.0)
            acc_up = _add_product(u, a, acc_up, IS_LEFT)
    total = tl.sum(acc, 0)
    total_up = tl.sum(acc_up, 0)
    if not IS_LEFT:
        total = tl.trans(total)
        total_up = tl.trans(total_up)
    store_outputs(
        total, total_up, square, x, squares, bias, residual, out, output, num_rows, columns,
        outputs, out_stride, eps, following, values, next_squares, IS_GATED,
    )  # fmt: skip


@triton.jit
def store_outputs(
    total, total_up, square, x, squares, bias, residual, out, output, num_rows, columns, outputs,
    out_stride, eps, following, values, next_squares, IS_GATED: tl.constexpr,
):  # fmt: skip
    """Writes (outputs, rows) sums with what is fused to them; total_up: those of up, if gated.
    square: as loaded from squares."""
    kind = out.dtype.element_ty
    row = tl.arange(0, total.shape[1])
    is_output = output < outputs
    is_row = row < num_rows
    mask = is_output[:, None] & is_row[None, :]
    target = row[None, :].to(tl.int64) * out_stride + output[:, None]
    if squares is not None:
        scale = tl.rsqrt(tl.sum(square, 0) / columns + eps)[None, :]
        total = total * scale
        total_up = total_up * scale
    if IS_GATED:
        gate = silu(total.to(x.dtype.element_ty).to(tl.float32))
        up = total_up.to(x.dtype.element_ty).to(tl.float32)
        total = gate.to(x.dtype.element_ty).to(tl.float32) * up
    if bias is not None:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    if residual is not None:
        total = total.to(kind).to(tl.float32)
        total += tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)
    total = total.to(kind)
    tl.store(out + target, total, mask=mask)
    if following is not None:
        wide = total.to(tl.float32)
        norm = tl.load(following + output, mask=is_output, other=0.0).to(tl.float32)
        place = row[None, :].to(tl.int64) * outputs + output[:, None]
        tl.store(values + place, (wide * norm[:, None]).to(kind), mask=mask)
        part = row * tl.num_programs(0) + tl.program_id(0)
        own = tl.where(mask, wide * wide, 0.0)
        tl.store(next_squares + part, tl.sum(own, 0), mask=is_row)


@triton.jit
def _add_product(w, a, acc, IS_LEFT: tl.constexpr):
    """w: (warps, outputs, columns). a: (warps, rows, columns). Each warp's own product."""
    if IS_LEFT:
        acc = tl.dot(w, tl.permute(a, (0, 2, 1)), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, tl.permute(w, (0, 2, 1)), acc, input_precision="ieee")
    return acc


# Sums of one program.
_SUMMED = 1024


def add_up(parts: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out = the sums of each row's parts, in their order, + bias. parts: (T, n, outputs) float32.
    out: (T, outputs), or columns of a wider tensor."""
    num_rows, num_parts, outputs = parts.shape
    _add_up[(ceil_div(outputs, _SUMMED), num_rows)](
        parts, bias, out, outputs, out.stride(0), PARTS=num_parts, SIZE=_SUMMED, num_warps=4,
        **overlapped(),
    )  # fmt: skip


@triton.jit
def _add_up(
    parts, bias, out, outputs, out_stride,
    PARTS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_kernels_before(PDL)
    output = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row = tl.program_id(1).to(tl.int64)
    mask = output < outputs
    total = tl.zeros((SIZE,), tl.float32)
    for part in tl.static_range(PARTS):
        at = (row * PARTS + part) * outputs + output
        total += tl.load(parts + at, mask=mask, other=0.0)
    if bias is not None:
        total += tl.load(bias + output, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + output, total.to(out.dtype.element_ty), mask=mask)
