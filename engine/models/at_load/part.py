"""`Part`: a linear layer, or rows of one, that is rounded to as many bits throughout."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.models.at_load.rounding import GROUP_SIZE, LEVELS, Codes, Kind
from penstock.engine.models.layers.fp8 import Fp8Linear
from penstock.engine.models.layers.grouped import GroupedLinear
from penstock.engine.models.layers.weight_formats import LEVELS_FORMAT, integer_format

_MAX_NAMES = 3


@dataclass(frozen=True, slots=True)
class Part:
    """A linear layer, or rows of one, that is rounded to as many bits throughout.

    names: the checkpoint's layers that it is stacked from.
    """

    names: tuple[str, ...]
    rows: int
    in_features: int
    kind: Kind

    @property
    def key(self) -> str:
        """Of no other part of the model."""
        if len(self.names) <= _MAX_NAMES:
            return "+".join(self.names)
        return f"{self.names[0]}+...+{self.names[-1]}"  # of experts

    @property
    def weight_format(self) -> str:
        if self.kind is Kind.FP8:
            return Fp8Linear.weight_format
        return LEVELS_FORMAT if self.kind is Kind.INT4 else integer_format(8, is_symmetric=True)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.in_features

    def empty(self, device: torch.device) -> Codes:
        def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return Codes.allocated(self.kind, self.rows, self.in_features, allocate)

    def linear(self, codes: Codes, bias: Tensor | None) -> GroupedLinear | Fp8Linear:
        if self.kind is Kind.FP8:
            return Fp8Linear(codes.codes, codes.scales, bias, block=(1, self.in_features))
        return GroupedLinear(
            codes.codes,
            codes.scales,
            bias,
            group_size=GROUP_SIZE,
            in_features=self.in_features,
            levels=torch.tensor(LEVELS, dtype=torch.int8) if self.kind is Kind.INT4 else None,
        )
