"""The numbers of a weight's codes, see `CodedWeight`: in registers, with the scales and zeros of
their groups, and in memory."""

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from penstock.engine.kernels.codes.weight import CodedWeight
from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import ceil_div

# The interpreter has no assembler.
_HAS_ASSEMBLER = tl.constexpr(not knobs.runtime.interpret)
# Four bytes become the numbers of their low halves, two to a register, and then of the high ones.
_HALVES = tl.constexpr("=r,=r,=r,=r,r")


@triton.constexpr_function
def _differences(kind):
    """Each half less 8. A half is the last bits of a number whose step is 1: of 128 in bfloat16, of
    1024 in float16. (0xEA: and, then or.)

    Source: Kim et al. 2022, "Who Says Elephants Can't Run" (arXiv:2211.10017), section 4.
    """
    # Before Hopper, pairs of bfloat16 have no other arithmetic.
    number, one, less, add = "0x43004300", "0x3F803F80", "0xC308C308", "fma.rn.bf16x2"
    if kind == "fp16":
        number, one, less, add = "0x64006400", "0x3C003C00", "0xE408E408", "fma.rn.f16x2"
    return f"""{{
        .reg .b32 a, b, c, d, m, n;
        mov.b32 n, {one};
        mov.b32 m, {less};
        prmt.b32 a, $4, 0, 0x4140;
        prmt.b32 b, $4, 0, 0x4342;
        shr.b32 c, a, 4;
        shr.b32 d, b, 4;
        lop3.b32 a, a, 0x000F000F, {number}, 0xEA;
        lop3.b32 b, b, 0x000F000F, {number}, 0xEA;
        lop3.b32 c, c, 0x000F000F, {number}, 0xEA;
        lop3.b32 d, d, 0x000F000F, {number}, 0xEA;
        {add} $0, a, n, m;
        {add} $1, b, n, m;
        {add} $2, c, n, m;
        {add} $3, d, n, m;
    }}"""


@triton.constexpr_function
def _lookups(levels, kind):
    """Looks up each half's level, its first and second byte in a table of 16 bytes each.

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
    """Makes numbers of the low and the high halves of bytes, without zeros, in the type `kind`."""
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
    """Makes an int8 of a code of 4 bits, without zeros."""
    if LEVELS is None:
        number = code.to(tl.int8) - 8
    else:
        wide = code.to(tl.int32)
        low = tl.where(wide < 4, LEVELS[0], LEVELS[1])
        high = tl.where(wide < 12, LEVELS[2], LEVELS[3])
        number = (tl.where(wide < 8, low, high) >> ((wide & 3) * 8)).to(tl.int8)
    return number


# Four bytes become numbers, two to a register.
_BYTES = tl.constexpr("=r,=r,r")


@triton.constexpr_function
def widening(kind):
    """float8_e4m3fn as a wider type: a number with the same exponent and fraction has another bias,
    7 for 127 or 15, so that it is multiplied by 2^120 or 2^8; zeros are added as above. NaN is no
    such number: checkpoints with it are refused."""
    shift, mask, factor, multiply = 4, "0x07F007F0", "0x7B807B80", "fma.rn.bf16x2"
    if kind == "fp16":
        shift, mask, factor, multiply = 1, "0x3F803F80", "0x5C005C00", "fma.rn.f16x2"
    return f"""{{
        .reg .b32 a, b, c, d, f, z;
        mov.b32 f, {factor};
        mov.b32 z, 0x80008000;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        shr.b32 c, a, {shift};
        shr.b32 d, b, {shift};
        and.b32 a, a, z;
        and.b32 b, b, z;
        lop3.b32 c, c, {mask}, a, 0xEA;
        lop3.b32 d, d, {mask}, b, 0xEA;
        {multiply} $0, c, f, z;
        {multiply} $1, d, f, z;
    }}"""


@triton.jit
def _whole(codes, kind: tl.constexpr):
    """Makes numbers of codes of 8 bits, without zeros, in the type `kind`: see `CodedWeight`."""
    if codes.dtype == tl.int8:
        numbers = codes.to(kind)
    elif _HAS_ASSEMBLER and kind == tl.bfloat16:
        of_bf16: tl.constexpr = widening("bf16")
        numbers = tl.inline_asm_elementwise(
            of_bf16, _BYTES, [codes], tl.bfloat16, is_pure=True, pack=4
        )
    elif _HAS_ASSEMBLER and kind == tl.float16:
        of_fp16: tl.constexpr = widening("fp16")
        numbers = tl.inline_asm_elementwise(
            of_fp16, _BYTES, [codes], tl.float16, is_pure=True, pack=4
        )
    else:
        wide = codes.to(tl.int8, bitcast=True).to(tl.int16)
        halves_of_it = ((wide << 7) & -16385).to(tl.float16, bitcast=True)
        numbers = (halves_of_it.to(tl.float32) * 256.0).to(kind)
    return numbers


@triton.jit
def numbers(codes, kind: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr):
    """Makes numbers of the low and the high halves of bytes, without zeros, in the type `kind`: the
    same number twice of codes of 8 bits."""
    if BITS == 8:
        low = _whole(codes, kind)
        high = low
    else:
        low, high = _halves(codes, kind, LEVELS)
    return low, high


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
