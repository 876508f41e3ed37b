"""Linear layers for few rows, fused with what surrounds them in a decode layer.

At batch 1 to 16 a matrix product is bound by reading the weight, and every further launch costs as
much as reading 6 MB of weights. So one kernel reads the weight once, far ahead, and also computes
the RMSNorm of its input (a scale per row, applied at the end, except in float16), SiLU(gate) * up,
the bias, and the residual addition.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.activation import silu
from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import NUM_SMS, ceil_div, next_power_of_2

# The largest row count it is meant for: twice the smallest that the matrix units take.
MAX_ROWS = 16
FEW_ROWS = 8


class Tile(NamedTuple):
    """A program's outputs, and the columns that it reads at a time; stages of these in flight."""

    outputs: int
    chunk: int
    stages: int
    warps: int


# With four stages, 24 KiB of the weight are in flight, and 12 or 24 of x. Twice the chunk would
# spill registers if there is a norm. Written and read once each, a KiB of the weight takes shared
# memory 24 clocks with its share of x, 32 if there are more than eight rows; a norm adds to that.
# An H200's memory delivers a KiB to a multiprocessor in some 50.
TILE = Tile(outputs=16, chunk=256, stages=4, warps=2)
# For layers whose outputs are too few to occupy every multiprocessor evenly with tiles of 16.
NARROW = Tile(outputs=8, chunk=256, stages=6, warps=2)
# For 9 to 16 rows, where tiles of 16 outputs would read as many bytes of x, from the cache, as of
# the weight. Three stages, so that two programs fit a multiprocessor.
WIDE = Tile(outputs=32, chunk=256, stages=3, warps=2)
# Programs of a first wave: three for each multiprocessor.
FETCHING = 3 * NUM_SMS
# Prefetched of a weight to the L2 cache while the previous kernel still runs: what memory delivers
# in the 2 us that one kernel takes to drain and the next to fill, a small part of the cache.
_AHEAD_BYTES = 2**23


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
    tile: Tile | None = None,
) -> None:
    """out = x' W^T + bias + residual, where x' is x, or its RMSNorm if `norm` is given.

    x: (T, columns), T at most MAX_ROWS. weight: (outputs, columns). out, residual: (T, outputs),
    or columns of a wider tensor; they may be the same. is_gated: weight is (2 * outputs, columns),
    the gate's rows first, and out = silu(gate) * up, without a bias or residual. Sums are float32.
    tile: by default one that gives a row the same bits whatever the others are.
    """
    num_rows, columns = x.shape
    outputs = out.shape[1]
    tile = tile or tile_of(outputs, num_rows)
    chunk = max(16 * tile.warps, min(tile.chunk, next_power_of_2(columns)))
    assert residual is None or residual.stride(0) == out.stride(0), residual.stride()
    assert num_rows <= MAX_ROWS and not (is_gated and (bias is not None or residual is not None))
    # The left operand of a product has 16 rows at least: these, or the weight's.
    rows = FEW_ROWS if num_rows <= FEW_ROWS and tile.outputs >= 16 else MAX_ROWS
    # No more than there are chunks: shared memory decides how many programs fit.
    num_stages = min(tile.stages, ceil_div(columns, chunk) + 1)
    _skinny[(ceil_div(outputs, tile.outputs),)](
        x, weight, norm, bias, residual, out, num_rows, columns, outputs, out.stride(0), eps,
        ahead_of_row(weight, columns, tile.outputs * (1 + is_gated), tile.chunk),
        IS_GATED=is_gated, ROWS=rows, OUTPUTS=tile.outputs, CHUNK=chunk, WARPS=tile.warps,
        FETCHING=FETCHING, num_warps=tile.warps, num_stages=num_stages, **overlapped(),
    )  # fmt: skip


def tile_of(outputs: int, num_rows: int) -> Tile:
    """The narrow one where tiles of 16 would leave the multiprocessors idle a quarter of the time.

    All divide the columns alike, so an output is the same sum whatever the number of rows.
    """
    programs = ceil_div(outputs, TILE.outputs)
    if programs < 0.75 * NUM_SMS * ceil_div(programs, NUM_SMS):
        return NARROW
    wide_programs = ceil_div(outputs, WIDE.outputs)
    return WIDE if num_rows > FEW_ROWS and wide_programs > 0.9 * NUM_SMS else TILE


def ahead_of_row(weight: Tensor, columns: int, rows: int, chunk: int) -> int:
    """Bytes of each row to prefetch, of which a program has `rows`; a multiple of 16, as the
    instruction requires."""
    row_bytes = columns * weight.element_size()
    if row_bytes % 16:
        return 0
    share = _AHEAD_BYTES // min(len(weight), FETCHING * rows) // 16 * 16
    return min(row_bytes, max(share, chunk * weight.element_size()))


# One thread in four, so that the rows are spread over the warps.
_FETCH = tl.constexpr("""{
    .reg .pred wanted;
    setp.ne.b32 wanted, $2, 0;
    @wanted cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.b32 $0, 0;
}""")


@triton.jit
def _fetch_ahead(weight, first, end, columns, ahead, ROWS: tl.constexpr):
    """Prefetches the first bytes of weight rows [first, first + ROWS) below end to L2."""
    thread = tl.arange(0, ROWS * 4)
    row = first + thread // 4
    size = tl.where((thread % 4 == 0) & (row < end), ahead, 0)
    address = (weight + row.to(tl.int64) * columns).to(tl.int64)
    tl.inline_asm_elementwise(
        _FETCH, "=r,l,r", [address, size], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def fetch_outputs(
    weight, outputs, columns, ahead,
    OUTPUTS: tl.constexpr, IS_GATED: tl.constexpr, FETCHING: tl.constexpr,
):  # fmt: skip
    """Prefetches a program's rows of a weight, whose rows for up follow those of the gate."""
    first = tl.program_id(0) * OUTPUTS
    # Later programs start when their weights are wanted: too late to fetch ahead.
    soon = tl.where(tl.program_id(0) < FETCHING, ahead, 0)
    _fetch_ahead(weight, first, outputs, columns, soon, OUTPUTS)
    if IS_GATED:
        _fetch_ahead(weight, first + outputs, 2 * outputs, columns, soon, OUTPUTS)


@triton.jit
def _squares(x):
    """The sum of each eight neighbouring columns' squares, x being (warps, rows, columns): so a
    thread adds up its own."""
    parts = tl.reshape(x * x, (x.shape[0], x.shape[1], x.shape[2] // 8, 8))
    return tl.sum(parts, 3)


@triton.jit
def _inverse_rms(square, columns, eps):
    """For each row, of its sums of squares, (warps, rows, parts): (rows,)."""
    return tl.rsqrt(tl.sum(tl.sum(square, 2), 0) / columns + eps)


@triton.jit
def norms_before(x_row, norm, offset, is_row, columns, square, eps, CHUNK: tl.constexpr):
    """Each row's factor for `load_inputs`, (rows,): in float16, where a row times the norm's weight
    may exceed what the type holds before its norm, the inverse RMS."""
    if (norm is not None) & (x_row.dtype.scalar.element_ty == tl.float16):
        for start in range(0, columns, CHUNK):
            column = (start + offset)[:, None, :]
            mask = is_row[None, :, None] & (column < columns)
            square += _squares(tl.load(x_row + column, mask=mask, other=0.0).to(tl.float32))
        inverse = _inverse_rms(square, columns, eps)
    else:
        inverse = tl.full((x_row.shape[1],), 1.0, tl.float32)
    return inverse


@triton.jit
def load_inputs(x_row, norm, column, is_row, columns, inverse, square):
    """x at these columns, (warps, 1, n), times its norm's weight; and the sum of its squares until
    there, or in float16 x times `inverse` before that."""
    is_column = column < columns
    a = tl.load(x_row + column, mask=is_row[None, :, None] & is_column, other=0.0)
    if norm is not None:
        wide = a.to(tl.float32)
        scale = tl.load(norm + column, mask=is_column, other=0.0).to(tl.float32)
        if a.dtype == tl.float16:
            wide = wide * inverse[None, :, None]
        else:
            square += _squares(wide)
        a = (wide * scale).to(a.dtype)
    return a, square


@triton.jit(do_not_specialize=["num_rows", "ahead"])
def _skinny(
    x, weight, norm, bias, residual, out, num_rows, columns, outputs, out_stride, eps, ahead,
    IS_GATED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, CHUNK: tl.constexpr,
    WARPS: tl.constexpr, FETCHING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of all rows. Each warp multiplies its own columns of a chunk, so that the
    weight is read from shared memory once. What has 16 rows at least is the left operand."""
    if PDL:
        fetch_outputs(weight, outputs, columns, ahead, OUTPUTS, IS_GATED, FETCHING)
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
    square = tl.zeros((WARPS, ROWS, PART // 8), tl.float32)
    inverse = norms_before(x_row, norm, offset, is_row, columns, square, eps, CHUNK)
    for start in range(0, columns, CHUNK):
        column = (start + offset)[:, None, :]
        mask = is_output[None, :, None] & (column < columns)
        w = tl.load(weight_row + column, mask=mask, other=0.0)
        a, square = load_inputs(x_row, norm, column, is_row, columns, inverse, square)
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
        total, total_up, square, x, norm, bias, residual, out, output, num_rows, columns, outputs,
        out_stride, eps, IS_GATED,
    )  # fmt: skip


@triton.jit
def store_outputs(
    total, total_up, square, x, norm, bias, residual, out, output, num_rows, columns, outputs,
    out_stride, eps, IS_GATED: tl.constexpr,
):  # fmt: skip
    """Writes (outputs, rows) sums with what is fused to them; total_up: those of up, if gated.
    square: each row's sums of squares."""
    kind = out.dtype.element_ty
    row = tl.arange(0, total.shape[1])
    is_output = output < outputs
    mask = is_output[:, None] & (row < num_rows)[None, :]
    target = row[None, :].to(tl.int64) * out_stride + output[:, None]
    if (norm is not None) & (x.dtype.element_ty != tl.float16):
        scale = _inverse_rms(square, columns, eps)[None, :]
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
    tl.store(out + target, total.to(kind), mask=mask)


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
