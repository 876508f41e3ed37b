"""Scales and zeros of the groups that codes are in: see `CodedWeight`."""

import triton
import triton.language as tl

from penstock.engine.kernels.codes.numbers import numbers


@triton.jit
def load_groups(
    table, stride, column, columns, output, is_output,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
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
    w, byte, scales, zeros, stride, columns, output, is_output, kind: tl.constexpr,
    HAS_SCALES: tl.constexpr, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, LEVELS: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """The weights of w, (outputs, size) bytes of which the first is `byte`, a multiple of RUN: of
    the type `kind`, those of low halves and those of high ones, which are the same of 8 bits.

    They are rounded once, from float32, as weights that are dequantized. HAS_SCALES: else not
    multiplied.
    """
    column = (byte + tl.arange(0, w.shape[1] // RUN) * RUN) * (8 // BITS)
    low, high = numbers(w, kind, BITS, LEVELS)
    if zeros is not None:
        zero, zero_high = load_groups(
            zeros, stride, column, columns, output, is_output, BITS, GROUP_SIZE, RUN
        )
        low -= _by_byte(zero, RUN).to(kind)
        if BITS == 4:
            high -= _by_byte(zero_high, RUN).to(kind)
    if HAS_SCALES:
        scale, scale_high = load_groups(
            scales, stride, column, columns, output, is_output, BITS, GROUP_SIZE, RUN
        )
        low = (low.to(tl.float32) * _by_byte(scale, RUN)).to(kind)
        if BITS == 4:
            high = (high.to(tl.float32) * _by_byte(scale_high, RUN)).to(kind)
    return low, high


@triton.jit
def _by_byte(table, RUN: tl.constexpr):
    """(runs, outputs) as (outputs, runs * RUN)."""
    RUNS: tl.constexpr = table.shape[0]
    OUTPUTS: tl.constexpr = table.shape[1]
    each = tl.broadcast_to(tl.trans(table)[:, :, None], (OUTPUTS, RUNS, RUN))
    return tl.reshape(each, (OUTPUTS, RUNS * RUN))
