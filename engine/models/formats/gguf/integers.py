"""Types whose codes are integers, or stand for the numbers of a table.

Source of the layouts: ggml-common.h and ggml-quants.c of ggml. `blocks`, in all of these, is
(blocks, bytes of a block) uint8.
"""

import torch
from torch import Tensor

from penstock.engine.models.formats.gguf.unpacked import (
    Unpacked,
    halves,
    in_order,
    planes,
    signed,
)

# Of a byte that holds five numbers of 0, 1 or 2: it is the fraction 0.abcde in base 3, of 256ths.
_POWERS_OF_3 = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)
_NAN_OF_E4M3 = 0x7F


def q8_0(blocks: Tensor) -> Unpacked:
    return Unpacked(signed(blocks[:, 2:]), halves(blocks[:, :2]))


def small(blocks: Tensor, *, has_minima: bool = False, has_fifth: bool = False) -> Unpacked:
    """Unpacks Q4_0, Q4_1, Q5_0, Q5_1 or IQ4_NL: a scale, a minimum if any, the fifth bits of all
    codes if they have one, and their low halves."""
    numbers, packed = blocks.tensor_split([4 if has_minima else 2], dim=1)
    fifth, packed = packed.tensor_split([4 if has_fifth else 0], dim=1)
    codes = planes(packed, 4, 16)
    if has_fifth:
        codes |= in_order(fifth, 1) << 4
    scales, *least = torch.split(halves(numbers), 1, dim=1)
    return Unpacked(codes, scales, minima=-least[0] if least else None)


def q2_k(blocks: Tensor) -> Unpacked:
    packed, codes, factor, minimum_factor = torch.split(blocks, [16, 64, 2, 2], dim=1)
    scales, minima = signed(packed & 15), signed(packed >> 4)
    factors = halves(factor), halves(minimum_factor)
    return Unpacked(planes(codes, 2, 32), scales, factors[0], minima, factors[1])


def q3_k(blocks: Tensor) -> Unpacked:
    """Sixteen groups, each with a scale of 6 bits."""
    high, low, lower, upper, factor = torch.split(blocks, [32, 64, 8, 4, 2], dim=1)
    scales = planes(lower, 4, 8) | planes(upper, 2, 4) << 4
    codes = planes(low, 2, 32) | planes(high, 1, 32) << 2
    return Unpacked(codes, signed(scales) - 32, halves(factor))


def q4_k(blocks: Tensor) -> Unpacked:
    return _with_minima(blocks, planes(blocks[:, 16:], 4, 32))


def q5_k(blocks: Tensor) -> Unpacked:
    fifth = planes(blocks[:, 16:48], 1, 32)
    return _with_minima(blocks, planes(blocks[:, 48:], 4, 32) | fifth << 4)


def _with_minima(blocks: Tensor, codes: Tensor) -> Unpacked:
    """Unpacks Q4_K or Q5_K, whose scales and minima are codes of 6 bits in 12 bytes, and each have
    a factor."""
    factor, minimum_factor = torch.split(halves(blocks[:, :4]), 1, dim=1)
    low, middle, high = torch.split(blocks[:, 4:16], 4, dim=1)
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), dim=1)
    return Unpacked(codes, signed(scales), factor, signed(minima), minimum_factor)


def q6_k(blocks: Tensor) -> Unpacked:
    low, high, scales, factor = torch.split(blocks, [128, 64, 16, 2], dim=1)
    codes = planes(low, 4, 64) | planes(high, 2, 32) << 4
    return Unpacked(codes, signed(scales), halves(factor))


def iq4_xs(blocks: Tensor) -> Unpacked:
    """Eight groups of 32, each with a scale of 6 bits: 4 of them in a half of a byte, and 2."""
    scales = in_order(blocks[:, 4:8], 4) | in_order(blocks[:, 2:4], 2) << 4
    return Unpacked(planes(blocks[:, 8:], 4, 16), signed(scales) - 32, halves(blocks[:, :2]))


def mxfp4(blocks: Tensor) -> Unpacked:
    """A power of two for 32 codes, which stand for twice their numbers. That of codes which are all
    zero, for which llama.cpp writes the least, becomes one that float16 holds."""
    codes = planes(blocks[:, 1:], 4, 16)
    exponents = blocks[:, :1].int()
    # As float32 has it, halved: the last two are not normal numbers.
    bits = torch.where(exponents < 2, 1 << 21 + exponents.clamp(max=1), exponents - 1 << 23)
    is_zero = (codes & 7 == 0).all(dim=1, keepdim=True)
    return Unpacked(codes, bits.view(torch.float32).masked_fill(is_zero, 1.0))


def nvfp4(blocks: Tensor) -> Unpacked:
    """Four groups of 16, each with a scale in e4m3 without a sign; codes as those of MXFP4."""
    scales = (blocks[:, :4] & 0x7F).view(torch.float8_e4m3fn).half() / 2
    scales = scales.masked_fill(blocks[:, :4] == _NAN_OF_E4M3, 0.0)
    codes = planes(blocks[:, 4:].reshape(-1, 8), 4, 8)
    return Unpacked(codes.view(len(blocks), -1), scales)


# The codes of the rest are -1, 0 and 1, or -1 and 1, and become codes of 4 bits around 8.


def tq1_0(blocks: Tensor) -> Unpacked:
    parts = torch.split(blocks, [32, 16, 4, 2], dim=1)
    codes = [_base_3(part, num) for part, num in zip(parts[:3], (5, 5, 4), strict=True)]
    return Unpacked(torch.cat(codes, dim=1) + 7, halves(parts[3]))


def _base_3(packed: Tensor, num: int) -> Tensor:
    """Returns the first digits of all bytes, then the second ones, and so on."""
    shifted = packed.unsqueeze(1) * _POWERS_OF_3[:num].unsqueeze(1)
    return (shifted.int() * 3 >> 8).to(torch.uint8).flatten(1)


def tq2_0(blocks: Tensor) -> Unpacked:
    return Unpacked(planes(blocks[:, :64], 2, 32) + 7, halves(blocks[:, 64:]))


def q1_0(blocks: Tensor) -> Unpacked:
    return Unpacked(2 * in_order(blocks[:, 2:], 1) + 7, halves(blocks[:, :2]))


def q2_0(blocks: Tensor) -> Unpacked:
    return Unpacked(in_order(blocks[:, 2:], 2) + 7, halves(blocks[:, :2]))
