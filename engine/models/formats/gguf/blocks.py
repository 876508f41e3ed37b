"""The blocks of a GGUF tensor as its numbers, or as the codes of a `GroupedLinear`.

Source of the layouts: ggml-common.h and ggml-quants.c of ggml. `raw`, in all of these, is the bytes
of some rows: (rows, bytes of a row) uint8.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.files.gguf.header import TensorType
from penstock.engine.models.formats.scheme import FLOAT16_BYTES, Scheme
from penstock.engine.models.layers.grouped import GroupedLinear, packed_bits, packed_nibbles
from penstock.engine.models.layers.weight_formats import (
    LEVELS_FORMAT,
    CodedLayout,
    block_format,
    integer_format,
)

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The codes of IQ4 stand for these.
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks(Scheme):
    """A type of GGUF. block_size: numbers whose scales, and minima, have a factor in common; None
    where these are numbers in float16 themselves. has_levels: codes stand for the numbers of a
    table."""

    bits: int
    group_size: int = 32
    block_size: int | None = None
    has_minima: bool = False
    has_levels: bool = False

    @property
    def middle(self) -> int:
        """By how much the codes in a file exceed their numbers, before minima."""
        is_unsigned = self.bits < 8 and not self.has_minima and not self.has_levels
        return 1 << (self.bits - 1) if is_unsigned else 0

    @property
    def is_grouped(self) -> bool:
        """Returns whether it is codes of 4 or 8 bits with a scale for each group alone."""
        return self.bits in (4, 8) and self.block_size is None and not self.has_minima

    @property
    def weight_format(self) -> str:
        if not self.is_grouped:
            return block_format(self.bits, has_minima=self.has_minima)
        return LEVELS_FORMAT if self.has_levels else integer_format(self.bits, is_symmetric=True)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        num = out_features * in_features
        scale_bytes = 1 if self.block_size else FLOAT16_BYTES
        scales = num // self.group_size * scale_bytes
        if self.block_size:
            scales += num // self.block_size * FLOAT16_BYTES
        return num * self.bits // 8 + scales * (2 if self.has_minima else 1)

    def gpu_layout(self, in_features: int) -> CodedLayout | None:
        if not self.is_grouped:
            return None
        sizes = self.bits, self.group_size, in_features
        return CodedLayout.fitting(*sizes, has_zeros=False, has_halves=True)


class Unpacked(NamedTuple):
    """Some blocks, whose numbers are scale * (code - middle) - minimum each.

    codes: (blocks, numbers) uint8, or int8 around 0. scales and minima: (blocks, groups) float16,
    or int8, to be multiplied by the factors: (blocks, 1) float16.
    """

    codes: Tensor
    scales: Tensor
    factors: Tensor | None = None
    minima: Tensor | None = None
    minimum_factors: Tensor | None = None


def numbers(raw: Tensor, kind: TensorType) -> Tensor:
    """(rows, columns): float32, or the type of the file where that is a plain one."""
    if kind.name in _PLAIN:
        return raw.view(_PLAIN[kind.name])
    unpack, layout = _TYPES[kind.name]
    unpacked = unpack(raw.view(-1, kind.block_bytes))
    codes = unpacked.codes.view(*unpacked.scales.shape, layout.group_size)
    if layout.has_levels:
        values = torch.tensor(IQ4_LEVELS, dtype=torch.float32)[codes.int()]
    else:
        values = codes.float() - layout.middle
    values *= _product(unpacked.scales, unpacked.factors)
    if unpacked.minima is not None:
        values -= _product(unpacked.minima, unpacked.minimum_factors)
    return values.view(len(raw), -1)


def scheme(kind: TensorType) -> Blocks | None:
    """Returns how the linear layer of `coded` is stored; None where the numbers are plain."""
    return None if kind.name in _PLAIN else _TYPES[kind.name][1]


def coded(raw: Tensor, kind: TensorType) -> GroupedLinear:
    """Returns the layer of some rows, without a bias."""
    unpack, layout = _TYPES[kind.name]
    unpacked = unpack(raw.view(-1, kind.block_bytes))

    def by_row(numbers: Tensor | None) -> Tensor | None:
        return None if numbers is None else numbers.reshape(len(raw), -1)

    codes = unpacked.codes.view(len(raw), -1)
    has_high = 4 < layout.bits < 8
    return GroupedLinear(
        codes if layout.bits == 8 else packed_nibbles(codes & 15),
        unpacked.scales.reshape(len(raw), -1),
        None,
        group_size=layout.group_size,
        in_features=codes.shape[1],
        levels=torch.tensor(IQ4_LEVELS, dtype=torch.int8) if layout.has_levels else None,
        high=packed_bits(codes >> 4, layout.bits - 4) if has_high else None,
        minima=by_row(unpacked.minima),
        factors=by_row(unpacked.factors),
        minimum_factors=by_row(unpacked.minimum_factors),
    )


def _product(by_group: Tensor, factors: Tensor | None) -> Tensor:
    """Returns in float32 what multiplies each number of a group."""
    wide = by_group.float()
    return (wide if factors is None else wide * factors.float()).unsqueeze(-1)


def _halves(blocks: Tensor) -> Tensor:
    """Pairs of bytes as float16."""
    return blocks.contiguous().view(torch.float16)


def _signed(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.int8)


def _nibbles(packed: Tensor) -> Tensor:
    """Returns the low halves of some bytes, (..., n), and then the high ones: (..., 2n)."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q8_0(blocks: Tensor) -> Unpacked:
    return Unpacked(_signed(blocks[:, 2:]), _halves(blocks[:, :2]))


def _small(blocks: Tensor, *, has_minima: bool = False, has_fifth: bool = False) -> Unpacked:
    """Unpacks Q4_0, Q4_1, Q5_0, Q5_1 or IQ4_NL: a scale, a minimum if any, the fifth bits of all
    codes if they have one, and their low halves."""
    halves, packed = blocks.tensor_split([4 if has_minima else 2], dim=1)
    fifth, packed = packed.tensor_split([4 if has_fifth else 0], dim=1)
    codes = _nibbles(packed)
    if has_fifth:
        bits = fifth.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)
        codes |= (bits & 1).flatten(1) << 4
    scales, *least = torch.split(_halves(halves), 1, dim=1)
    return Unpacked(codes, scales, minima=-least[0] if least else None)


def _with_minima(blocks: Tensor, codes: Tensor) -> Unpacked:
    """Unpacks Q4_K or Q5_K, whose scales and minima are codes of 6 bits in 12 bytes, and each have
    a factor. codes: (blocks, 8, 32)."""
    factor, minimum_factor = torch.split(_halves(blocks[:, :4]), 1, dim=1)
    low, middle, high = torch.split(blocks[:, 4:16], 4, dim=1)
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), dim=1)
    return Unpacked(codes, _signed(scales), factor, _signed(minima), minimum_factor)


def _k_codes(packed: Tensor) -> Tensor:
    """(blocks, 128) to (blocks, 8, 32): of 32 bytes, the low halves are one group."""
    return _nibbles(packed.reshape(-1, 4, 32)).view(-1, 8, 32)


def _q4_k(blocks: Tensor) -> Unpacked:
    return _with_minima(blocks, _k_codes(blocks[:, 16:]))


def _q5_k(blocks: Tensor) -> Unpacked:
    group = torch.arange(8, dtype=torch.uint8).view(8, 1)
    fifth = blocks[:, 16:48].unsqueeze(1) >> group & 1
    return _with_minima(blocks, _k_codes(blocks[:, 48:]) | fifth << 4)


def _q6_k(blocks: Tensor) -> Unpacked:
    low, high, scales, factor = torch.split(blocks, [128, 64, 16, 2], dim=1)
    pair = torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)
    upper = high.reshape(-1, 2, 1, 32) >> pair & 3
    lower = _nibbles(low.reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    return Unpacked((lower | upper << 4).flatten(1), _signed(scales), _halves(factor))


def _iq4_xs(blocks: Tensor) -> Unpacked:
    """Eight groups of 32, each with a scale of 6 bits: 4 of them in a half of a byte, and 2."""
    lower = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    pair = torch.arange(0, 8, 2, dtype=torch.uint8)
    upper = (blocks[:, 2:4].unsqueeze(-1) >> pair & 3).flatten(1)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 8, 16))
    scales = _signed(lower | upper << 4) - 32
    return Unpacked(codes.flatten(1), scales, _halves(blocks[:, :2]))


# By name: what unpacks blocks, (blocks, bytes), and how they are stored.
_TYPES: dict[str, tuple[Callable[[Tensor], Unpacked], Blocks]] = {
    "Q4_0": (_small, Blocks(bits=4)),
    "Q4_1": (partial(_small, has_minima=True), Blocks(bits=4, has_minima=True)),
    "Q5_0": (partial(_small, has_fifth=True), Blocks(bits=5)),
    "Q5_1": (partial(_small, has_minima=True, has_fifth=True), Blocks(bits=5, has_minima=True)),
    "Q8_0": (_q8_0, Blocks(bits=8)),
    "Q4_K": (_q4_k, Blocks(bits=4, block_size=256, has_minima=True)),
    "Q5_K": (_q5_k, Blocks(bits=5, block_size=256, has_minima=True)),
    "Q6_K": (_q6_k, Blocks(bits=6, group_size=16, block_size=256)),
    "IQ4_NL": (_small, Blocks(bits=4, has_levels=True)),
    "IQ4_XS": (_iq4_xs, Blocks(bits=4, block_size=256, has_levels=True)),
}
