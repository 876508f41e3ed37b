"""Linear layers for few rows whose weights are codes of 8 or 4 bits, with a scale for each group.

As `penstock.engine.kernels.linear`, with half or a quarter of the bytes: codes become numbers of
the model's type in registers, and each group's product is a float32 that is multiplied by its
scale. Activations keep their type (W8A16, W4A16).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedWeight:
    """W[n, k] = scales[g, n] * (code[n, k] - zeros[g, n]), where g is k // group_size.

    codes: (out_features, row_bytes) int8 or uint8, row_bytes a multiple of 2 * run. Of 8 bits, a
    byte is a code; of 4, a byte b has the code of column 2 * run * (b // run) + b % run in its low
    half, and of that plus `run` in its high half: so a thread's codes are neighbours of one group.
    scales: (groups, out_features) float32, as the copies that run ahead have 4 bytes at least; or
    int32, (groups / 2, out_features): of two groups float16 each, the first one's in the low half,
    where the halves of bytes are of two groups. zeros: None, or as the scales; of 4 bits
    less 8. run: divides group_size, 16 at least. levels: what the 16 codes of 4 bits stand for
    instead, as four words of four bytes.
    """

    bits: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    run: int
    columns: int
    levels: tuple[int, int, int, int] | None

    @property
    def out_features(self) -> int:
        return len(self.codes)


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


# The interpreter has no assembler.
_HAS_ASSEMBLER = tl.constexpr(not knobs.runtime.interpret)
# Of four bytes, what their low halves stand for, two to a register, and then their high halves.
_HALVES = tl.constexpr("=r,=r,=r,=r,r")


@triton.constexpr_function
def _differences(kind):
    """Each half less 8. A half is the last bits of a number whose step is 1: of 128 in bfloat16, of
    1024 in float16. (0xEA: and, then or.)

    Source: Kim et al. 2022, "Who Says Elephants Can't Run" (arXiv:2211.10017), section 4.
    """
    number, less, minus = "0x43004300", "0x43084308", "sub.bf16x2"
    if kind == "fp16":
        number, less, minus = "0x64006400", "0x64086408", "sub.f16x2"
    return f"""{{
        .reg .b32 a, b, c, d, m;
        mov.b32 m, {less};
        prmt.b32 a, $4, 0, 0x4140;
        prmt.b32 b, $4, 0, 0x4342;
        shr.b32 c, a, 4;
        shr.b32 d, b, 4;
        lop3.b32 a, a, 0x000F000F, {number}, 0xEA;
        lop3.b32 b, b, 0x000F000F, {number}, 0xEA;
        lop3.b32 c, c, 0x000F000F, {number}, 0xEA;
        lop3.b32 d, d, 0x000F000F, {number}, 0xEA;
        {minus} $0, a, m;
        {minus} $1, b, m;
        {minus} $2, c, m;
        {minus} $3, d, m;
    }}"""


@triton.constexpr_function
def _lookups(levels, kind):
    """Of each half, the level's first and second byte, from a table of 16 bytes each.

    prmt picks four bytes of eight by three bits each; the fourth picks of two such results.
    """
    bias, digits = (127, 7) if kind == "bf16" else (15, 10)
    first, second = [0, 0, 0, 0], [0, 0, 0, 0]
    for index in range(16):
        byte = (levels[index // 4] >> (index % 4 * 8)) & 0xFF
        number = byte - 256 if byte > 127 else byte
        size = -number if number < 0 else number
        bits = 0x8000 if number < 0 else 0
        if size:
            exponent = 7
            while size < 2**exponent:
                exponent -= 1
            bits |= (bias + exponent) << digits | (size << (digits - exponent)) & (2**digits - 1)
        first[index // 4] |= (bits & 0xFF) << (index % 4 * 8)
        second[index // 4] |= (bits >> 8) << (index % 4 * 8)
    body = ""
    for half in (0, 1):
        for name, words in (("p", first), ("q", second)):
            body += f"""
        mov.b32 x, {words[0]}; mov.b32 y, {words[1]}; prmt.b32 {name}, x, y, e;
        mov.b32 x, {words[2]}; mov.b32 y, {words[3]}; prmt.b32 x, x, y, e;
        prmt.b32 {name}, {name}, x, f;"""
        body += f"""
        prmt.b32 ${half}, p, q, 0x6240; prmt.b32 ${half + 2}, p, q, 0x7351;"""
        if half == 0:
            body += """
        shr.b32 e, e, 16; shr.b32 f, f, 16;"""
    return f"""{{
        .reg .b32 e, f, p, q, x, y;
        and.b32 e, $4, 0x77777777;
        shr.b32 f, $4, 1;
        lop3.b32 f, f, 0x44444444, 0x32103210, 0xEA;
        {body}
    }}"""


@triton.constexpr_function
def unpacking(levels, kind):
    return _differences(kind) if levels is None else _lookups(levels, kind)


@triton.jit
def _halves(codes, kind: tl.constexpr, LEVELS: tl.constexpr):
    """What the low and the high halves of bytes stand for, without zeros, in the type `kind`."""
    if _HAS_ASSEMBLER and kind == tl.bfloat16:
        of_bf16: tl.constexpr = unpacking(LEVELS, "bf16")
        low, high = tl.inline_asm_elementwise(
            of_bf16, _HALVES, [codes], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif _HAS_ASSEMBLER and kind == tl.float16:
        of_fp16: tl.constexpr = unpacking(LEVELS, "fp16")
        low, high = tl.inline_asm_elementwise(
            of_fp16, _HALVES, [codes], (tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        low = _number(codes & 15, LEVELS).to(kind)
        high = _number(codes >> 4, LEVELS).to(kind)
    return low, high


@triton.jit
def _number(code, LEVELS: tl.constexpr):
    """What a code of 4 bits stands for, without zeros: an int8."""
    if LEVELS is None:
        number = code.to(tl.int8) - 8
    else:
        wide = code.to(tl.int32)
        low = tl.where(wide < 4, LEVELS[0], LEVELS[1])
        high = tl.where(wide < 12, LEVELS[2], LEVELS[3])
        number = (tl.where(wide < 8, low, high) >> ((wide & 3) * 8)).to(tl.int8)
    return number


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
    scale, scale_high = _of_groups(
        scales, scale_stride, column, columns, output, is_output, BITS, GROUP_SIZE, RUN
    )
    if HAS_ZEROS:
        zero, zero_high = _of_groups(
            zeros, scale_stride, column, columns, output, is_output, BITS, GROUP_SIZE, RUN
        )
    if BITS == 8:
        numbers = w.to(kind)
        if HAS_ZEROS:
            numbers = numbers - zero.to(kind)[:, :, None]
        acc += _product(numbers, a) * scale[:, :, None]
    else:
        low, high = _halves(w, kind, LEVELS)
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


@triton.jit
def _of_groups(
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
    """Scales or zeros, (warps, outputs), of the groups that have `column`, and where bytes have
    codes of two groups, of the other."""
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
        low, high = _halves(w, out.dtype.element_ty, LEVELS)
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
