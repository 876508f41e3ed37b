"""The blocks of a GGUF tensor as its numbers, or as the codes of a `GroupedLinear`.

What has fewer than 4 bits in the file has codes of 4 bits here, the fewest that products read.
`raw`, in all of these, is the bytes of some rows: (rows, bytes of a row) uint8.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from penstock.engine.files.gguf.header import TensorType
from penstock.engine.models.formats.fp4.config import Fp4
from penstock.engine.models.formats.gguf import codebooks, integers
from penstock.engine.models.formats.gguf.unpacked import Unpacked
from penstock.engine.models.formats.scheme import FLOAT16_BYTES, FLOAT32_BYTES, Scheme
from penstock.engine.models.layers.grouped import GroupedLinear, packed_bits, packed_nibbles
from penstock.engine.models.layers.weight_formats import (
    LEVELS_FORMAT,
    CodedLayout,
    Spans,
    block_format,
    integer_format,
    sizes_of_parts,
)

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The codes of IQ4 stand for these.
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_Q3 = tuple(range(-4, 12))


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks(Scheme):
    """A type of GGUF. block_size: numbers whose scales, and minima, have a factor in common; None
    where these are numbers in float16 themselves. unit: what the factors are multiplied by. levels:
    the 16 numbers that codes stand for, if not integers. scale_bytes: of one without a factor."""

    bits: int
    group_size: int = 32
    block_size: int | None = None
    has_minima: bool = False
    levels: tuple[int, ...] | None = None
    unit: float = 1.0
    scale_bytes: int = FLOAT16_BYTES

    @property
    def middle(self) -> int:
        """By how much the codes in a file exceed their numbers, before minima."""
        is_unsigned = self.bits < 8 and not self.has_minima and self.levels is None
        return 1 << (self.bits - 1) if is_unsigned else 0

    @property
    def is_grouped(self) -> bool:
        """Returns whether it is codes of 4 or 8 bits with a scale for each group alone."""
        return self.bits in (4, 8) and self.block_size is None and not self.has_minima

    @property
    def weight_format(self) -> str:
        if not self.is_grouped:
            return block_format(self.bits, has_minima=self.has_minima)
        return LEVELS_FORMAT if self.levels else integer_format(self.bits, is_symmetric=True)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        scales = in_features // self.group_size * (1 if self.block_size else self.scale_bytes)
        if self.block_size:
            scales += -(-in_features // self.block_size) * FLOAT16_BYTES
        codes = in_features * self.bits // 8
        return out_features * (codes + scales * (2 if self.has_minima else 1))

    def of_columns(self, columns: Spans) -> "Blocks | None":
        """Returns how the layer of these columns alone is stored; None where its groups are smaller
        than products read."""
        group, block = sizes_of_parts(columns, self.group_size, self.block_size or 0)
        if group % (8 if self.is_grouped else 16):
            return None
        return replace(self, group_size=group, block_size=block if self.block_size else None)

    def scaled(self) -> "Blocks | None":
        """Returns how the layer is stored whose scales are multiplied by a number; None where they
        are codes, or float16 of necessity."""
        return replace(self, scale_bytes=FLOAT32_BYTES) if self.is_grouped else None

    def gpu_layout(self, in_features: int) -> CodedLayout | None:
        if not self.is_grouped:
            return None
        sizes = self.bits, self.group_size, in_features
        has_halves = self.scale_bytes == FLOAT16_BYTES
        return CodedLayout.fitting(*sizes, has_zeros=False, has_halves=has_halves)


def numbers(raw: Tensor, kind: TensorType) -> Tensor:
    """(rows, columns): float32, or the type of the file where that is a plain one."""
    if kind.name in _PLAIN:
        return raw.view(_PLAIN[kind.name])
    unpack, layout = _TYPES[kind.name]
    unpacked = unpack(raw.view(-1, kind.block_bytes))
    codes = unpacked.codes.view(*unpacked.scales.shape, layout.group_size)
    if layout.levels:
        values = torch.tensor(layout.levels, dtype=torch.float32)[codes.int()]
    else:
        values = codes.float() - layout.middle
    values *= _product(unpacked.scales, unpacked.factors) * layout.unit
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
        levels=torch.tensor(layout.levels, dtype=torch.int8) if layout.levels else None,
        high=packed_bits(codes >> 4, layout.bits - 4) if has_high else None,
        minima=by_row(unpacked.minima),
        factors=by_row(unpacked.factors),
        unit=layout.unit,
        minimum_factors=by_row(unpacked.minimum_factors),
    )


def _product(by_group: Tensor, factors: Tensor | None) -> Tensor:
    """Returns in float32 what multiplies each number of a group."""
    wide = by_group.float()
    return (wide if factors is None else wide * factors.float()).unsqueeze(-1)


def _magnitudes(*of_entries: int) -> tuple[int, ...]:
    """Returns the levels of codes whose highest bit is the sign."""
    padded = (*of_entries, *(0 for _ in range(8 - len(of_entries))))
    return (*padded, *(-level for level in padded))


_IQ = partial(Blocks, bits=4, block_size=256)
_IQ2 = partial(_IQ, levels=_magnitudes(8, 25, 43), unit=1 / 8)
# -1, 0 or 1, and an eighth more or less.
_IQ1 = partial(_IQ, levels=(-7, 1, 9, *[0] * 5, -9, -1, 7, *[0] * 5), unit=1 / 8)
_IQ3_XXS = _magnitudes(4, 12, 20, 28, 36, 44, 52, 62)
_IQ3_S = _magnitudes(1, 3, 5, 7, 9, 11, 13, 15)
# By name: what unpacks blocks, (blocks, bytes), and how they are stored.
_TYPES: dict[str, tuple[Callable[[Tensor], Unpacked], Blocks]] = {
    "Q4_0": (integers.small, Blocks(bits=4)),
    "Q4_1": (partial(integers.small, has_minima=True), Blocks(bits=4, has_minima=True)),
    "Q5_0": (partial(integers.small, has_fifth=True), Blocks(bits=5)),
    "Q5_1": (
        partial(integers.small, has_minima=True, has_fifth=True),
        Blocks(bits=5, has_minima=True),
    ),
    "Q8_0": (integers.q8_0, Blocks(bits=8)),
    "Q2_K": (integers.q2_k, Blocks(bits=4, group_size=16, block_size=256, has_minima=True)),
    "Q3_K": (integers.q3_k, Blocks(bits=4, group_size=16, block_size=256, levels=_Q3)),
    "Q4_K": (integers.q4_k, Blocks(bits=4, block_size=256, has_minima=True)),
    "Q5_K": (integers.q5_k, Blocks(bits=5, block_size=256, has_minima=True)),
    "Q6_K": (integers.q6_k, Blocks(bits=6, group_size=16, block_size=256)),
    "IQ4_NL": (integers.small, Blocks(bits=4, levels=_IQ4)),
    "IQ4_XS": (integers.iq4_xs, _IQ(levels=_IQ4)),
    "MXFP4": (integers.mxfp4, Blocks(bits=4, levels=Fp4.levels)),
    "NVFP4": (integers.nvfp4, Blocks(bits=4, group_size=16, levels=Fp4.levels)),
    "TQ1_0": (integers.tq1_0, Blocks(bits=4, group_size=256)),
    "TQ2_0": (integers.tq2_0, Blocks(bits=4, group_size=256)),
    "Q1_0": (integers.q1_0, Blocks(bits=4, group_size=128)),
    "Q2_0": (integers.q2_0, Blocks(bits=4, group_size=64)),
    "IQ2_XXS": (codebooks.iq2_xxs, _IQ2()),
    "IQ2_XS": (codebooks.iq2_xs, _IQ2(group_size=16)),
    "IQ2_S": (codebooks.iq2_s, _IQ2(group_size=16)),
    "IQ3_XXS": (codebooks.iq3_xxs, _IQ(levels=_IQ3_XXS, unit=1 / 4)),
    "IQ3_S": (codebooks.iq3_s, _IQ(levels=_IQ3_S)),
    "IQ1_S": (codebooks.iq1_s, _IQ1()),
    "IQ1_M": (codebooks.iq1_m, _IQ1(group_size=16)),
}
