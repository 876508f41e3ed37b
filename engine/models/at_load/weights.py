"""`Part`s that are rounded at load, and `QuantizedWeights`, the source of a model made of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.config import Quantization
from penstock.engine.models.at_load.rounding import GROUP_SIZE, LEVELS, Codes
from penstock.engine.models.formats.kept import AsStored, CodePolicy
from penstock.engine.models.layers.fp8 import Fp8Linear
from penstock.engine.models.layers.grouped import GroupedLinear
from penstock.engine.models.layers.linear import Linear, StackedLinear
from penstock.engine.models.parts.reader import TableRows, WeightSource

_MAX_NAMES = 3


@dataclass(frozen=True, slots=True)
class Part:
    """A linear layer, or rows of one, that is rounded to as many bits throughout. names: the
    checkpoint's layers that it is stacked from."""

    names: tuple[str, ...]
    rows: int
    in_features: int
    kind: Quantization

    @property
    def key(self) -> str:
        """A name that no other part of the model has."""
        if len(self.names) <= _MAX_NAMES:
            return "+".join(self.names)
        return f"{self.names[0]}+...+{self.names[-1]}"  # of experts

    @property
    def weight_format(self) -> str:
        return self.linear(self.empty(torch.device("meta")), None).weight_format

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.in_features

    def empty(self, device: torch.device) -> Codes:
        def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return Codes.allocated(self.kind, self.rows, self.in_features, allocate)

    def linear(self, codes: Codes, bias: Tensor | None) -> GroupedLinear | Fp8Linear:
        if self.kind is Quantization.FP8:
            return Fp8Linear(codes.codes, codes.scales, bias, block=(1, self.in_features))
        return GroupedLinear(
            codes.codes,
            codes.scales,
            bias,
            group_size=GROUP_SIZE,
            in_features=self.in_features,
            levels=torch.tensor(LEVELS, dtype=torch.int8)
            if self.kind is Quantization.INT4
            else None,
        )


CodesOf = Callable[[Part], Codes]


class QuantizedWeights:
    """Another source, whose linear layers are quantized as `parts_of` says; embedding, norms and
    biases are its own."""

    def __init__(
        self,
        plain: WeightSource,
        parts_of: Callable[[tuple[str, ...], int, int], Sequence[Part]],
        codes_of: CodesOf,
        kept: CodePolicy | None = None,
    ) -> None:
        """parts_of: see `Scheme.parts`. codes_of: returns the codes of a part. kept: by default
        layers stay as they are made, on the codes' device."""
        self._plain = plain
        self._parts_of = parts_of
        self._codes_of = codes_of
        self._kept = kept or AsStored()

    def read(self, shape: tuple[int, ...], *names: str, dtype: torch.dtype | None = None) -> Tensor:
        return self._plain.read(shape, *names, dtype=dtype)

    def table(self, shape: tuple[int, int], name: str) -> TableRows:
        return self._plain.table(shape, name)

    def quantized(self, shape: tuple[int, int], bias: Tensor | None, *names: str) -> Linear | None:
        linears = []
        row = 0
        for part in self._parts_of(names, *shape):
            end = row + part.rows
            part_bias = None if bias is None else bias[row:end]
            linears.append(part.linear(self._codes_of(part), part_bias))
            row = end
        if not linears:
            return None
        linear = linears[0] if len(linears) == 1 else StackedLinear(linears)
        return self._kept.layer(linear) or linear
