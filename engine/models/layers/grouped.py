"""Linear layers whose weights are codes of 8 or 4 bits, with a scale for each group of them."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.models.layers.linear import StoredLinear, bands, tensor_bytes
from penstock.engine.models.quantization.schemes import integer_format

# Of the number that a code of 4 bits stands for without zeros or levels: code - 8.
_MIDDLE = 8
# Weights that are widened together, in some 20 bytes each.
_MAX_WIDENED = 2**22


class GroupedLinear:
    """W[n, k] = scales[n, g] * (code[n, k] - zeros[n, g]), where g is k // group_size.

    codes: (out_features, in_features) int8, or uint8 of half as many columns: two codes of 4 bits,
    0 to 15, that of the even k in the low half. scales: (out_features, groups) float16 or float32;
    the last group may be shorter. zeros: (out_features, groups), int8 with codes of 8 bits, and
    uint8 with those of 4; None means 0 for the former and 8 for the latter. levels: (16,) int8,
    what codes of 4 bits stand for instead, without zeros; of E2M1, for example, twice its numbers.
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
    ) -> None:
        self.bits = 8 if codes.dtype is torch.int8 else 4
        self.codes = codes
        self.scales = scales
        self.zeros = zeros
        self.levels = levels
        self.bias = bias
        self.group_size = group_size
        self.in_features = in_features
        groups = -(-in_features // group_size)
        assert codes.shape[1] == -(-in_features * self.bits // 8), (codes.shape, in_features)
        assert scales.shape == (len(codes), groups), (scales.shape, codes.shape, groups)
        assert zeros is None or (zeros.shape == scales.shape and zeros.dtype == codes.dtype)
        assert levels is None or (self.bits == 4 and zeros is None)
        self.num_bytes = tensor_bytes(codes, scales, zeros, bias)

    @property
    def weight_format(self) -> str:
        return integer_format(self.bits, is_symmetric=self.zeros is None)

    @property
    def out_features(self) -> int:
        return len(self.codes)

    def weight(self) -> Tensor:
        """W in float32, (out_features, in_features)."""
        return self._weight(0, self.out_features)

    def write_weight(self, out: Tensor) -> None:
        """See `StoredLinear`."""
        for start, stop in bands(self.out_features):
            out[start:stop] = self._weight(start, stop)

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
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Slowly: the weights are widened in each call, and then multiplied in the type of x."""
        num_rows = max(1, _MAX_WIDENED // self.in_features)
        if self.out_features > num_rows:  # so that little of an output layer is wide at a time
            starts = range(0, self.out_features, num_rows)
            return torch.cat([self.rows(at, at + num_rows)(x) for at in starts], dim=-1)
        return functional.linear(x, self.weight().to(x.dtype), self.bias)

    def _weight(self, start: int, stop: int) -> Tensor:
        """These rows of W, in float32."""
        numbers = self._numbers(self.codes[start:stop])
        scales = self.scales[start:stop].float()
        if self.zeros is not None:
            zeros = self.zeros[start:stop].float()
            numbers = numbers - _by_column(zeros, self.group_size, self.in_features)
        return numbers * _by_column(scales, self.group_size, self.in_features)

    def _numbers(self, stored: Tensor) -> Tensor:
        """What rows of codes stand for, before zeros: in_features columns of float32."""
        if self.bits == 8:
            return stored.float()
        halves = torch.stack((stored & 15, stored >> 4), dim=-1)
        codes = halves.flatten(1)[:, : self.in_features]
        if self.levels is not None:
            return self.levels.float()[codes.long()]
        return codes.float() - (_MIDDLE if self.zeros is None else 0)


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

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def packed_nibbles(codes: Tensor) -> Tensor:
    """Codes 0 to 15, (out_features, in_features), two to a byte as `GroupedLinear` has them."""
    if codes.shape[1] % 2:
        codes = functional.pad(codes, (0, 1))
    codes = codes.to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4


def _by_column(of_groups: Tensor, group_size: int, columns: int) -> Tensor:
    return of_groups.repeat_interleave(group_size, dim=1)[:, :columns]
