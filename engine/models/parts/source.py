"""`WeightSource`: where the tensors of a model come from."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from penstock.engine.models.layers.linear import Linear

# Allocates the memory that a weight is read into, on the device and in the type of its choice.
Empty = Callable[[tuple[int, ...]], Tensor]


class WeightSource(Protocol):
    def read(self, shape: tuple[int, ...], *names: str) -> Tensor:
        """The tensors `names` of the checkpoint, stacked along their first dimension to `shape`."""
        ...

    def table(self, shape: tuple[int, int], name: str) -> Tensor:
        """One of which a step reads few rows: in the type that it is stored in, and where there is
        a file, mapped from it."""
        ...

    def quantized(self, shape: tuple[int, int], bias: Tensor | None, *names: str) -> Linear | None:
        """The linear layer of these, in a format of its own; None where the weights are plain.

        shape: (out_features, in_features). names: of layers, such as "model.layers.0.mlp.up_proj".
        """
        ...
