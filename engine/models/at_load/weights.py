"""`QuantizedWeights`: the source of a model whose linear layers are quantized at load."""

from collections.abc import Callable, Sequence

from torch import Tensor

from penstock.engine.models.at_load.part import Part
from penstock.engine.models.at_load.rounding import Codes
from penstock.engine.models.formats.kept import AsStored, Kept
from penstock.engine.models.layers.linear import Linear, StackedLinear
from penstock.engine.models.parts.reader import WeightSource

CodesOf = Callable[[Part], Codes]


class QuantizedWeights:
    """Another source, whose linear layers are all quantized; embedding, norms and biases are its
    own."""

    def __init__(
        self,
        plain: WeightSource,
        parts_of: Callable[[tuple[str, ...], int, int], Sequence[Part]],
        codes_of: CodesOf,
        kept: Kept | None = None,
    ) -> None:
        """parts_of: see `Scheme.parts`. codes_of: what a part is rounded to. kept: by default
        layers stay as they are made, on the codes' device."""
        self._plain = plain
        self._parts_of = parts_of
        self._codes_of = codes_of
        self._kept = kept or AsStored()

    def read(self, shape: tuple[int, ...], *names: str) -> Tensor:
        return self._plain.read(shape, *names)

    def table(self, shape: tuple[int, int], name: str) -> Tensor:
        return self._plain.table(shape, name)

    def quantized(self, shape: tuple[int, int], bias: Tensor | None, *names: str) -> Linear:
        linears = []
        row = 0
        for part in self._parts_of(names, *shape):
            end = row + part.rows
            of_rows = None if bias is None else bias[row:end]
            linears.append(part.linear(self._codes_of(part), of_rows))
            row = end
        linear = linears[0] if len(linears) == 1 else StackedLinear(linears)
        return self._kept.layer(linear) or linear
