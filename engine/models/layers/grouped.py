"""Linear layers whose weights are codes of 8 to 4 bits, with a scale for each group of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.models.layers.linear import StoredLinear, bands, tensor_bytes
from penstock.engine.models.layers.weight_formats import LEVELS_FORMAT, block_format, integer_format

FACTOR_COLUMNS = 256
# Weights that are widened together, in some 20 bytes each.
_MAX_WIDENED = 2**22


@dataclass(frozen=True, slots=True)
class BlockParts:
    """What a `GroupedLinear` has besides where its weights are as in GGUF's blocks.

    high: (out_features, in_features * (bits - 4) // 8) uint8, the bits of codes of 5 or 6 bits
    above their low 4, eight or four to a byte, the first lowest; None for codes of 4 bits. minima:
    (out_features, groups), which are subtracted. factors: (out_features, blocks) float16, a block
    being 256 columns; scales are int8 then, to be multiplied by them. minimum_factors: the same for
    minima. Without factors, minima are float16.
    """

    high: Tensor | None = None
    minima: Tensor | None = None
    factors: Tensor | None = None
    minimum_factors: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.high, self.minima, self.factors, self.minimum_factors

    def rows(self, first: int, end: int) -> "BlockParts":
        return BlockParts(*(None if each is None else each[first:end] for each in self.tensors()))


class GroupedLinear:
    """W[n, k] = scales[n, g] * (code[n, k] - zeros[n, g]), where g is k // group_size.

    codes: (out_features, in_features) int8, or uint8 of half as many columns: two codes of 4 bits,
    0 to 15, that of the even k in the low half. scales: (out_features, groups) float16 or float32;
    the last group may be shorter. zeros: (out_features, groups), int8 with codes of 8 bits, and
    uint8 with those of 4; None means 0 for the former and 8 for the latter. levels: (16,) int8,
    what codes of 4 bits stand for instead, without zeros; of E2M1, for example, twice its numbers.

    blocks: then codes are those of the low 4 bits, without zeros; of 5 and 6 bits, they are around
    16 and 32, and with minima above 0. Groups are of a multiple of 16, and whole.
    """

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        *,
        group_size: int,
        in_features: int,
        zeros: Tensor | None = None,
        levels: Tensor | None = None,
        blocks: BlockParts | None = None,
    ) -> None:
        self.bits = 8 if codes.dtype is torch.int8 else 4
        self.codes = codes
        self.scales = scales
        self.zeros = zeros
        self.levels = levels
        self.blocks = blocks
        self.bias = bias
        self.group_size = group_size
        self.in_features = in_features
        groups = -(-in_features // group_size)
        assert codes.shape[1] == -(-in_features * self.bits // 8), (codes.shape, in_features)
        assert scales.shape == (len(codes), groups), (scales.shape, codes.shape, groups)
        assert zeros is None or (zeros.shape == scales.shape and zeros.dtype == codes.dtype)
        assert levels is None or (self.bits == 4 and zeros is None)
        self.num_bytes = tensor_bytes(codes, scales, zeros, bias)
        if blocks is not None:
            assert self.bits == 4 and zeros is None and group_size % 16 == 0, group_size
            assert in_features % group_size == 0, (in_features, group_size)
            self.num_bytes += tensor_bytes(*blocks.tensors())
            if blocks.high is not None:
                self.bits += 8 * blocks.high.shape[1] // in_features

    @property
    def weight_format(self) -> str:
        if self.blocks is not None:
            return block_format(self.bits, has_minima=self.blocks.minima is not None)
        if self.levels is not None:
            return LEVELS_FORMAT
        return integer_format(self.bits, is_symmetric=self.zeros is None)

    @property
    def out_features(self) -> int:
        return len(self.codes)

    @property
    def middle(self) -> int:
        """What unsigned codes are above the numbers they stand for, before zeros and minima."""
        has_minima = self.blocks is not None and self.blocks.minima is not None
        return 0 if has_minima or self.zeros is not None else 1 << (self.bits - 1)

    def write_weight(self, out: Tensor) -> None:
        """See `StoredLinear`."""
        for start, stop in bands(self.out_features):
            out[start:stop] = self.rows(start, stop).weight()

    def rows(self, first: int, end: int) -> "GroupedLinear":
        """These outputs alone. Their tensors are views."""
        return GroupedLinear(
            self.codes[first:end],
            self.scales[first:end],
            None if self.bias is None else self.bias[first:end],
            group_size=self.group_size,
            in_features=self.in_features,
            zeros=None if self.zeros is None else self.zeros[first:end],
            levels=self.levels,
            blocks=None if self.blocks is None else self.blocks.rows(first, end),
        )

    def regrouped(self, group_size: int) -> "GroupedLinear":
        """The same weights in smaller groups, of a size that divides theirs."""
        if self.group_size == group_size:
            return self
        groups = torch.arange(-(-self.in_features // group_size)) * group_size // self.group_size
        blocks = self.blocks
        if blocks is not None and blocks.minima is not None:
            blocks = replace(blocks, minima=blocks.minima[:, groups])
        return GroupedLinear(
            self.codes,
            self.scales[:, groups],
            self.bias,
            group_size=group_size,
            in_features=self.in_features,
            zeros=None if self.zeros is None else self.zeros[:, groups],
            levels=self.levels,
            blocks=blocks,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Slowly: the weights are widened in each call, and then multiplied in the type of x."""
        num_rows = max(1, _MAX_WIDENED // self.in_features)
        if self.out_features > num_rows:  # so that little of an output layer is wide at a time
            starts = range(0, self.out_features, num_rows)
            return torch.cat([self.rows(at, at + num_rows)(x) for at in starts], dim=-1)
        return functional.linear(x, self.weight().to(x.dtype), self.bias)

    def weight(self) -> Tensor:
        """W in float32, (out_features, in_features)."""
        numbers = self._numbers()
        blocks = self.blocks or BlockParts()
        if self.zeros is not None:
            numbers = numbers - self._by_column(self.zeros)
        numbers = numbers * self._by_column(self.scales, blocks.factors)
        if blocks.minima is not None:
            numbers -= self._by_column(blocks.minima, blocks.minimum_factors)
        return numbers

    def _numbers(self) -> Tensor:
        """What codes stand for, before zeros: in_features columns of float32."""
        if self.bits == 8:
            return self.codes.float()
        halves = torch.stack((self.codes & 15, self.codes >> 4), dim=-1)
        codes = halves.flatten(1)[:, : self.in_features]
        if self.levels is not None:
            return self.levels.float()[codes.long()]
        if self.blocks is not None and self.blocks.high is not None:
            codes = codes | _unpacked(self.blocks.high, self.bits - 4) << 4
        return codes.float() - self.middle

    def _by_column(self, of_groups: Tensor, factors: Tensor | None = None) -> Tensor:
        """For each number, in float32."""
        numbers = of_groups.float()
        if factors is not None:
            each = FACTOR_COLUMNS // self.group_size
            of_blocks = factors.float().repeat_interleave(each, dim=1)
            numbers = numbers * of_blocks[:, : numbers.shape[1]]
        return numbers.repeat_interleave(self.group_size, dim=1)[:, : self.in_features]


class StackedLinear:
    """Layers of different formats that read the same x: y is theirs, one after the other."""

    weight_format = "stacked"

    def __init__(self, parts: Sequence[StoredLinear]) -> None:
        self.parts = tuple(parts)
        self.num_bytes = sum(part.num_bytes for part in parts)

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    def write_weight(self, out: Tensor) -> None:
        """See `StoredLinear`."""
        sizes = [part.out_features for part in self.parts]
        for part, rows in zip(self.parts, torch.split(out, sizes), strict=True):
            part.write_weight(rows)

    def rows(self, first: int, end: int) -> "StackedLinear":
        """These outputs alone. Their tensors are views."""
        parts, start = [], 0
        for part in self.parts:
            low, high = max(first - start, 0), min(end - start, part.out_features)
            if low < high:
                parts.append(part.rows(low, high))
            start += part.out_features
        return StackedLinear(parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def packed_nibbles(codes: Tensor) -> Tensor:
    """Codes 0 to 15, (out_features, in_features), two to a byte as `GroupedLinear` has them."""
    if codes.shape[1] % 2:
        codes = functional.pad(codes, (0, 1))
    codes = codes.to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4


def packed_bits(numbers: Tensor, bits: int) -> Tensor:
    """Numbers of 1 or 2 bits, (rows, columns) uint8, packed as `BlockParts.high`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (numbers.view(len(numbers), -1, 8 // bits) << shifts).sum(-1, dtype=torch.uint8)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (packed.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)
