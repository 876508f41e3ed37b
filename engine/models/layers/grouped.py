"""Linear layers whose weights are codes of 8 to 4 bits, with a scale for each group of them."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.kernels.codes.weight import CodedWeight
from penstock.engine.models.layers.coded import CodesLinear, coded_weight
from penstock.engine.models.layers.linear import bands, tensor_bytes
from penstock.engine.models.layers.weight_formats import (
    BY_COLUMN_FORMAT,
    LEVELS_FORMAT,
    CodedLayout,
    Spans,
    block_format,
    integer_format,
    sizes_of_parts,
)

_FACTOR_COLUMNS = 256
# Weights that are widened together, in some 20 bytes each.
_MAX_WIDENED = 2**22
_BY_GROUP = ("scales", "zeros", "minima")
_TENSORS = ("codes", *_BY_GROUP, "high", "factors", "minimum_factors")


@dataclass(eq=False)
class GroupedLinear(CodesLinear):
    """W[n, k] = scales[n, g] * (code[n, k] - zeros[n, g]), where g is k // group_size.

    codes: (out_features, in_features) int8, or uint8 of half as many columns: two codes of 4 bits,
    0 to 15, that of the even k in the low half. scales: (out_features, groups) float16 or float32;
    the last group may be shorter. zeros: (out_features, groups), int8 with codes of 8 bits, and
    uint8 with those of 4; None means 0 for the former and 8 for the latter. levels: (16,) int8,
    what codes of 4 bits stand for instead, without zeros; of E2M1, for example, twice its numbers.
    order: (in_features,) int32, the column of W and of x that each column of codes is; None where
    it is that of its place.

    The rest is for GGUF's blocks, whose codes are those of the low 4 bits, without zeros; of 5 and
    6 bits, they are around 16 and 32, and with minima above 0. Groups are of a multiple of 16, and
    whole. high: (out_features, in_features * (bits - 4) // 8) uint8, the bits above the low 4,
    eight or four to a byte, the first lowest. minima: (out_features, groups), which are subtracted.
    factors: (out_features, blocks) float16, a block being factor_columns; scales are int8 then, to
    be multiplied by them and by unit, a power of two. minimum_factors: the same for minima. Without
    factors, minima are float16.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None
    _: KW_ONLY
    group_size: int
    in_features: int
    zeros: Tensor | None = None
    levels: Tensor | None = None
    order: Tensor | None = None
    high: Tensor | None = None
    minima: Tensor | None = None
    factors: Tensor | None = None
    minimum_factors: Tensor | None = None
    factor_columns: int = _FACTOR_COLUMNS
    unit: float = 1.0

    def __post_init__(self) -> None:
        self.bits = bits = 8 if self.codes.dtype is torch.int8 else 4
        if self.high is not None:
            self.bits += 8 * self.high.shape[1] // self.in_features
        rows, columns, scales = len(self.codes), self.in_features, self.scales.shape
        groups = -(-columns // self.group_size)
        assert self.codes.shape[1] == -(-columns * bits // 8), (self.codes.shape, columns)
        assert scales == (rows, groups), (scales, self.codes.shape, groups)
        if self.zeros is not None:
            assert self.zeros.shape == scales and self.zeros.dtype == self.codes.dtype
        assert self.levels is None or (bits == 4 and self.zeros is None)
        if self.has_blocks:
            assert bits == 4 and self.zeros is None and self.group_size % 16 == 0, self.group_size
            assert columns % self.group_size == 0, (columns, self.group_size)
        self.num_bytes = tensor_bytes(self.bias, *(getattr(self, name) for name in _TENSORS))

    @property
    def has_blocks(self) -> bool:
        return any(each is not None for each in (self.high, self.minima, self.factors))

    @property
    def weight_format(self) -> str:
        if self.has_blocks:
            return block_format(self.bits, has_minima=self.minima is not None)
        if self.group_size == 1:
            return BY_COLUMN_FORMAT
        if self.levels is not None:
            return LEVELS_FORMAT
        return integer_format(self.bits, is_symmetric=self.zeros is None)

    @property
    def kind(self) -> Hashable:
        has = tuple(getattr(self, name) is None for name in _TENSORS)
        lists = (
            None if each is None else tuple(each.tolist()) for each in (self.levels, self.order)
        )
        return self.bits, self.group_size, self.factor_columns, self.unit, has, *lists

    @property
    def middle(self) -> int:
        """By how much unsigned codes exceed their numbers, before zeros and minima."""
        is_unsigned = self.minima is not None or self.zeros is not None
        return 0 if is_unsigned else 1 << (self.bits - 1)

    def rows(self, first: int, end: int) -> "GroupedLinear":
        """See `StoredLinear`."""
        return self._changed(("bias", *_TENSORS), lambda tensor: tensor[first:end])

    def joined(self, layers: Sequence["GroupedLinear"], bias: Tensor | None) -> "GroupedLinear":
        """See `StoredLinear`."""
        tensors: dict[str, Any] = {
            name: torch.cat([getattr(layer, name) for layer in layers])
            for name in _TENSORS
            if getattr(self, name) is not None
        }
        tensors["scales"] = shortest(tensors["scales"])
        return replace(self, bias=bias, **tensors)

    def release(self) -> None:
        super().release()
        self.high = self.minima = self.factors = self.minimum_factors = None

    def regrouped(self, group_size: int) -> "GroupedLinear":
        """Returns the same weights in smaller groups, of a size that divides theirs."""
        if self.group_size == group_size:
            return self
        groups = torch.arange(-(-self.in_features // group_size)) * group_size // self.group_size
        return self._changed(_BY_GROUP, lambda tensor: tensor[:, groups], group_size=group_size)

    def columns(self, parts: Spans) -> "GroupedLinear":
        """Returns the layer of these inputs alone, in this order. Not of one with an order."""
        assert self.order is None
        whole = self.in_features
        size, each = sizes_of_parts(parts, self.group_size, self.factor_columns)
        blocks = torch.cat([torch.arange(*part, each) for part in parts]) // self.factor_columns

        def chosen(tensor: Tensor) -> Tensor:
            width = tensor.shape[1]  # of all columns
            return torch.cat(
                [tensor[:, first * width // whole : end * width // whole] for first, end in parts],
                dim=1,
            )

        by_factor = self.regrouped(size)._changed(
            ("factors", "minimum_factors"), lambda tensor: tensor[:, blocks], factor_columns=each
        )
        in_features = sum(end - first for first, end in parts)
        return by_factor._changed(("codes", *_BY_GROUP, "high"), chosen, in_features=in_features)

    def _changed(
        self, names: Sequence[str], change: Callable[[Tensor], Tensor], **fields: Any
    ) -> "GroupedLinear":
        tensors = {name: getattr(self, name) for name in names}
        changed: dict[str, Any] = {
            name: change(each) for name, each in tensors.items() if each is not None
        }
        return replace(self, **changed, **fields)

    def coded_weight(self, device: torch.device) -> CodedWeight | None:
        has_halves = self.scales.dtype is torch.float16
        layout = None
        if not self.has_blocks and self.order is None:
            sizes = self.bits, self.group_size, self.in_features
            has_zeros = self.zeros is not None
            layout = CodedLayout.fitting(*sizes, has_zeros=has_zeros, has_halves=has_halves)
        if layout is None:
            return None
        return coded_weight(layout, self.codes, self.scales, self.zeros, self.levels, device)

    def write_weight(self, out: Tensor) -> None:
        """See `StoredLinear`."""
        for start, stop in bands(self.out_features):
            out[start:stop] = self.rows(start, stop).weight()

    def __call__(self, x: Tensor) -> Tensor:
        """Slowly: the weights are widened in each call, and then multiplied in the type of x."""
        num_rows = max(1, _MAX_WIDENED // self.in_features)
        if self.out_features > num_rows:  # so that little of an output layer is wide at a time
            starts = range(0, self.out_features, num_rows)
            return torch.cat([self.rows(at, at + num_rows)(x) for at in starts], dim=-1)
        return functional.linear(x, self.weight().to(x.dtype), self.bias)

    def weight(self) -> Tensor:
        """Returns W in float32, (out_features, in_features)."""
        numbers = self._numbers()
        if self.zeros is not None:
            numbers = numbers - self._by_column(self.zeros)
        numbers = numbers * self._by_column(self.scales, self.factors)
        if self.minima is not None:
            numbers -= self._by_column(self.minima, self.minimum_factors)
        return numbers if self.order is None else numbers[:, self.order.argsort()]

    def _numbers(self) -> Tensor:
        """Returns what codes stand for, before zeros: in_features columns of float32."""
        if self.bits == 8:
            return self.codes.float()
        halves = torch.stack((self.codes & 15, self.codes >> 4), dim=-1)
        codes = halves.flatten(1)[:, : self.in_features]
        if self.levels is not None:
            return self.levels.float()[codes.long()]
        if self.high is not None:
            codes = codes | _unpacked(self.high, self.bits - 4) << 4
        return codes.float() - self.middle

    def _by_column(self, by_group: Tensor, factors: Tensor | None = None) -> Tensor:
        """Returns the number of each column's group, in float32."""
        numbers = by_group.float()
        if factors is not None:
            each = self.factor_columns // self.group_size
            by_block = (factors.float() * self.unit).repeat_interleave(each, dim=1)
            numbers = numbers * by_block[:, : numbers.shape[1]]
        return numbers.repeat_interleave(self.group_size, dim=1)[:, : self.in_features]


def shortest(scales: Tensor) -> Tensor:
    """Returns those of float32 in float16 where it holds the same numbers."""
    if scales.dtype is not torch.float32:
        return scales
    half = scales.half()
    return half if torch.equal(half.float(), scales) else scales


def packed_nibbles(codes: Tensor) -> Tensor:
    """Codes 0 to 15, (out_features, in_features), two to a byte as `GroupedLinear` has them."""
    if codes.shape[1] % 2:
        codes = functional.pad(codes, (0, 1))
    codes = codes.to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4


def packed_bits(numbers: Tensor, bits: int) -> Tensor:
    """Numbers of 1 or 2 bits, (rows, columns) uint8, packed as `GroupedLinear.high`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (numbers.view(len(numbers), -1, 8 // bits) << shifts).sum(-1, dtype=torch.uint8)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (packed.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)
