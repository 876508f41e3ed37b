"""`Adapter`: the low-rank changes of a model's linear layers, and what torch computes with them.

Source: Hu et al. 2021, LoRA (arXiv:2106.09685). A layer's output y = W x becomes y + s B (A x).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.parts.tensors import Stack
from penstock.engine.step.model_input import AdapterRun


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer of a checkpoint: the rows of a stack that it is."""

    stack: Stack
    start: int
    out_features: int
    in_features: int

    @property
    def end(self) -> int:
        return self.start + self.out_features


@dataclass(frozen=True, slots=True)
class Change:
    """Changes one projection. down: A, (rank, in_features). up: B, (out_features, rank). scale: of
    B A x, which is not in B, since B would be rounded once more."""

    projection: Projection
    down: Tensor
    up: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)

    def of(self, x: Tensor) -> Tensor:
        """(T, in_features) to (T, out_features)."""
        return functional.linear(functional.linear(x, self.down), self.up) * self.scale


@dataclass(frozen=True, slots=True)
class Adapter:
    """layers: for each layer of the model, the changes of each stack, by their rows. rank: the
    highest of all layers, those of other stages too."""

    layers: tuple[Mapping[Stack, tuple[Change, ...]], ...]
    rank: int

    @property
    def changes(self) -> list[Change]:
        return [each for layer in self.layers for stack in layer.values() for each in stack]

    @property
    def num_bytes(self) -> int:
        return sum(change.down.nbytes + change.up.nbytes for change in self.changes)


def adapted(
    linear: Linear, x: Tensor, runs: tuple[AdapterRun, ...], layer: int, stack: Stack
) -> Tensor:
    """Applies the linear layer to x, (T, in_features), changed where a token has an adapter.

    runs: their weights are an `Adapter`. layer: its index.
    """
    y = linear(x)
    for run in runs:
        rows = slice(run.first_token, run.first_token + run.num_tokens)
        for change in run.weights.layers[layer].get(stack, ()):
            columns = slice(change.projection.start, change.projection.end)
            y[rows, columns] += change.of(x[rows])
    return y
