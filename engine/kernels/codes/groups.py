"""Scales and zeros of the groups that codes are in: see `CodedWeight`."""

import triton
import triton.language as tl

from penstock.engine.kernels.codes.numbers import halves, whole


@triton.jit
def of_groups(
    table,
    stride,
    column,
    columns,
    output,
    is_output,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    RUN: tl.constexpr,
):
    """Scales or zeros, (runs, outputs), of the groups that have `column`, and where bytes have
    codes of two groups, of the other. column: (runs,), of the first code of each run."""
    mask = is_output[None, :] & (column < columns)[:, None]
    if table.dtype.element_ty == tl.int32:
        pair = (column // (2 * GROUP_SIZE)).to(tl.int64)
        both = tl.load(table + pair[:, None] * stride + output[None, :], mask=mask, other=0)
        low = both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        group = (column // GROUP_SIZE).to(tl.int64)
        low = tl.load(table + group[:, None] * stride + output[None, :], mask=mask, other=0.0)
        high = low
        if BITS == 4 and GROUP_SIZE % (2 * RUN) != 0:
            group = ((column + RUN) // GROUP_SIZE).to(tl.int64)
            mask = is_output[None, :] & (column + RUN < columns)[:, None]
            high = tl.load(table + group[:, None] * stride + output[None, :], mask=mask, other=0.0)
    return low, high


@triton.jit
def scaled_numbers(
    w,
    byte,
    scales,
    zeros,
    stride,
    columns,
    output,
    is_output,
    kind: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    LEVELS: tl.constexpr,
    RUN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The weights of w, (OUTPUTS, SIZE) bytes of which the first is `byte`, a multiple of RUN: of
    the type `kind`, those of low halves and those of high ones, which are the same of 8 bits.

    They are rounded once, from float32, as weights that are dequantized. HAS_SCALES: else not
    multiplied.
    """
    column = (byte + tl.arange(0, SIZE // RUN) * RUN) * (8 // BITS)
    if BITS == 8:
        low = whole(w, kind)
        high = low
    else:
        low, high = halves(w, kind, LEVELS)
    if HAS_ZEROS:
        zero, zero_high = of_groups(
            zeros, stride, column, columns, output, is_output, BITS, GROUP_SIZE, RUN
        )
        low -= _of_bytes(zero, OUTPUTS, SIZE, RUN).to(kind)
        if BITS == 4:
            high -= _of_bytes(zero_high, OUTPUTS, SIZE, RUN).to(kind)
    if HAS_SCALES:
        scale, scale_high = of_groups(
            scales, stride, column, columns, output, is_output, BITS, GROUP_SIZE, RUN
        )
        low = (low.to(tl.float32) * _of_bytes(scale, OUTPUTS, SIZE, RUN)).to(kind)
        if BITS == 4:
            high = (high.to(tl.float32) * _of_bytes(scale_high, OUTPUTS, SIZE, RUN)).to(kind)
    return low, high


@triton.jit
def _of_bytes(of_runs, OUTPUTS: tl.constexpr, SIZE: tl.constexpr, RUN: tl.constexpr):
    """(runs, outputs) as (OUTPUTS, SIZE)."""
    each = tl.broadcast_to(tl.trans(of_runs)[:, :, None], (OUTPUTS, SIZE // RUN, RUN))
    return tl.reshape(each, (OUTPUTS, SIZE))
