"""Layers of the checkpoint before they are stacked, as q, k and v are into one layer.

Parts of one kind become one layer: their codes are concatenated, and their scales are given one
form. Parts of different kinds stay apart in a `StackedLinear`.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.models.layers.fp8 import Fp8Linear
from penstock.engine.models.layers.grouped import GroupedLinear, StackedLinear
from penstock.engine.models.layers.linear import PlainLinear, StoredLinear


class Part(Protocol):
    """rows: of the stacked weight. join: the layer of this and others of its kind."""

    @property
    def rows(self) -> int: ...

    @property
    def kind(self) -> Hashable: ...

    def join(self, parts: Sequence[Any], bias: Tensor | None) -> StoredLinear: ...


def stacked(parts: Sequence[Part], bias: Tensor | None) -> StoredLinear:
    if len({part.kind for part in parts}) == 1:
        return parts[0].join(parts, bias)
    rows = [part.rows for part in parts]
    biases = [None] * len(parts) if bias is None else torch.split(bias, rows)
    return StackedLinear([part.join([part], one) for part, one in zip(parts, biases, strict=True)])


@dataclass(frozen=True, slots=True)
class PlainPart:
    """read: returns the weight of the layers of these names, stacked, of so many rows."""

    name: str
    rows: int
    read: Callable[[int, Sequence[str]], Tensor]
    kind = "plain"

    def join(self, parts: Sequence["PlainPart"], bias: Tensor | None) -> PlainLinear:
        num_rows = sum(part.rows for part in parts)
        return PlainLinear(self.read(num_rows, [part.name for part in parts]), bias)


@dataclass(frozen=True, slots=True)
class GroupedPart:
    """As `GroupedLinear`, with scales of any floating type."""

    codes: Tensor
    scales: Tensor
    group_size: int
    in_features: int
    zeros: Tensor | None = None
    levels: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.codes)

    @property
    def kind(self) -> Hashable:
        has_levels, has_zeros = self.levels is not None, self.zeros is not None
        return self.codes.dtype, self.group_size, has_levels, has_zeros

    def join(self, parts: Sequence["GroupedPart"], bias: Tensor | None) -> GroupedLinear:
        zeros = [part.zeros for part in parts if part.zeros is not None]
        return GroupedLinear(
            # Copied, as what is mapped from a file is not in memory yet.
            torch.cat([part.codes for part in parts]),
            _shortest(torch.cat([part.scales.float() for part in parts])),
            bias,
            group_size=self.group_size,
            in_features=self.in_features,
            zeros=torch.cat(zeros) if zeros else None,
            levels=self.levels,
        )


@dataclass(frozen=True, slots=True)
class Fp8Part:
    """As `Fp8Linear`."""

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]

    @property
    def rows(self) -> int:
        return len(self.codes)

    @property
    def kind(self) -> Hashable:
        return self.codes.dtype, self.block[1]

    def join(self, parts: Sequence["Fp8Part"], bias: Tensor | None) -> Fp8Linear:
        height, width = self.block
        if any(part.block != self.block or part.rows % height for part in parts[:-1]) or (
            parts[-1].block != self.block
        ):
            height = 1
        scales = torch.cat([part.scales if height > 1 else part.by_row() for part in parts])
        # torch concatenates no float8 of every version; bytes it does.
        codes = torch.cat([part.codes.view(torch.uint8) for part in parts])
        return Fp8Linear(codes.view(self.codes.dtype), scales, bias, block=(height, width))

    def by_row(self) -> Tensor:
        """Scales for each row."""
        return self.scales.repeat_interleave(self.block[0], dim=0)[: self.rows]


def _shortest(scales: Tensor) -> Tensor:
    """float16 where it holds the same numbers."""
    half = scales.half()
    return half if torch.equal(half.float(), scales) else scales
