"""How a checkpoint stores one linear layer. Imports no tensors.

N is out_features and K in_features. Bytes are those of the layer that is read: scales count as
float16 where most checkpoints have such, and as float32 where the format implies it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from typing import Protocol

from penstock.engine.models.layers.weight_formats import (
    FP8_FORMAT,
    LEVELS_FORMAT,
    block_format,
    integer_format,
)

_FLOAT16_BYTES = 2
_FLOAT32_BYTES = 4


class Scheme(Protocol):
    @property
    def weight_format(self) -> str:
        """Of the layer that it is read as: see `Linear`."""
        ...

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Of that layer, without its bias."""
        ...


# Of a scheme, out_features and in_features: what such a layer takes where it is computed, without
# its bias; None where it becomes plain. See `Kept`.
KeptBytes = Callable[[Scheme, int, int], int | None]


@dataclass(frozen=True, slots=True)
class Fp8:
    """`weight` e4m3 (N, K), times a scale for all of it, for each row or for each block.

    block: rows and columns; None for one scale or one for each row.
    """

    block: tuple[int, int] | None = None
    weight_format = FP8_FORMAT

    def num_bytes(self, out_features: int, in_features: int) -> int:
        rows, columns = self.block or (1, in_features)
        scales = -(-out_features // rows) * -(-in_features // columns)
        return out_features * in_features + _FLOAT32_BYTES * scales


@dataclass(frozen=True, slots=True)
class Integers:
    """Of compressed-tensors: codes of 8 or 4 bits, with a scale for all, each row or each group.

    group_size: columns; None for one scale or one for each row. is_packed: in `weight_packed`, as
    unsigned numbers; otherwise `weight` is int8.
    """

    bits: int
    group_size: int | None
    is_symmetric: bool
    is_packed: bool

    @property
    def weight_format(self) -> str:
        return integer_format(self.bits, self.is_symmetric)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        group_size = self.group_size or in_features
        has_zeros = not self.is_symmetric
        return _grouped_bytes(out_features, in_features, self.bits, group_size, has_zeros)


@dataclass(frozen=True, slots=True)
class Awq:
    """`qweight`, `qzeros` and `scales` with K first, packed along N in AWQ's own order."""

    group_size: int | None

    @property
    def weight_format(self) -> str:
        return integer_format(4, is_symmetric=False)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        group_size = self.group_size or in_features
        return _grouped_bytes(out_features, in_features, 4, group_size, has_zeros=True)


@dataclass(frozen=True, slots=True)
class Gptq:
    """`qweight` packed along K, `qzeros` along N, symmetric.

    zero_offset: 1 where the zeros are stored less one, as in the format's first version, or 0.
    """

    bits: int
    group_size: int | None
    zero_offset: int

    @property
    def weight_format(self) -> str:
        return integer_format(self.bits, is_symmetric=True)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        group_size = self.group_size or in_features
        return _grouped_bytes(out_features, in_features, self.bits, group_size, has_zeros=False)


@dataclass(frozen=True, slots=True)
class Fp4:
    """E2M1, two to a byte, that of the even column in the low half, with a scale for each group.

    weight, scale: the names of the codes and of the groups' scales. global_scale: the name of a
    scale of all groups, whose scales are then e4m3; without it, they are powers of two (E8M0).
    divides: whether it is to be divided by.
    """

    group_size: int
    weight: str
    global_scale: str | None = None
    divides: bool = False
    scale: str = "weight_scale"
    weight_format = LEVELS_FORMAT

    def num_bytes(self, out_features: int, in_features: int) -> int:
        # A power of two is one in float16; e4m3 times a float32 is not.
        scale_bytes = _FLOAT32_BYTES if self.global_scale else _FLOAT16_BYTES
        codes = out_features * -(-in_features // 2)
        return codes + scale_bytes * out_features * -(-in_features // self.group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A type of GGUF. block_size: numbers whose scales, and minima, have a factor in common; None
    where these are numbers in float16 themselves. has_levels: codes stand for the numbers of a
    table."""

    bits: int
    group_size: int
    block_size: int | None
    has_minima: bool
    has_levels: bool

    @property
    def is_grouped(self) -> bool:
        """Whether it is codes of 4 or 8 bits with a scale for each group, and nothing else."""
        return self.bits in (4, 8) and self.block_size is None and not self.has_minima

    @property
    def weight_format(self) -> str:
        if not self.is_grouped:
            return block_format(self.bits, has_minima=self.has_minima)
        return LEVELS_FORMAT if self.has_levels else integer_format(self.bits, is_symmetric=True)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        num = out_features * in_features
        of_group = 1 if self.block_size else _FLOAT16_BYTES
        scales = num // self.group_size * of_group
        if self.block_size:
            scales += num // self.block_size * _FLOAT16_BYTES
        return num * self.bits // 8 + scales * (2 if self.has_minima else 1)


def columns_of_scale(scheme: Scheme) -> int | None:
    """Of safetensors: how many share a scale; None for all of a row."""
    if isinstance(scheme, Fp8):
        return scheme.block[1] if scheme.block else None
    assert isinstance(scheme, Awq | Fp4 | Gptq | Integers), scheme
    return scheme.group_size


def divided(scheme: Scheme, rows: int, columns: int) -> Scheme:
    """Of one of equal parts of a matrix, whose groups and blocks end where it ends: see `Cut`.
    rows, columns: of the part; 0 where it has all."""
    if isinstance(scheme, Fp8):
        if scheme.block is None:
            return scheme
        height, width = scheme.block
        return replace(scheme, block=(gcd(height, rows), gcd(width, columns)))
    assert isinstance(scheme, Awq | Fp4 | Gptq | Integers), scheme
    if scheme.group_size is None:
        return scheme
    return replace(scheme, group_size=gcd(scheme.group_size, columns))


def _grouped_bytes(
    out_features: int, in_features: int, bits: int, group_size: int, has_zeros: bool
) -> int:
    codes = out_features * -(-in_features * bits // 8)
    num_groups = out_features * -(-in_features // group_size)
    return codes + (_FLOAT16_BYTES + has_zeros) * num_groups
