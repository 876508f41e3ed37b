"""`PartReader` reads the tensors that a part declares from a `WeightSource`."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.models.layers.linear import Linear, MakeLinear
from penstock.engine.models.parts.norm.config import NormKind
from penstock.engine.models.parts.tensors import LinearSpec, VectorSpec
from penstock.engine.ranks.group import Group

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


class PartReader:
    """prefix: of the names of a layer's tensors; empty outside of layers. norm: of the model's.
    make_linear: makes the linear layers whose weights are plain."""

    def __init__(
        self, weights: WeightSource, make_linear: MakeLinear, norm: NormKind, prefix: str = ""
    ) -> None:
        self.weights = weights
        self.make_linear = make_linear
        self.norm_kind = norm
        self._prefix = prefix

    @property
    def eps(self) -> float:
        return self.norm_kind.eps

    def linear(self, spec: LinearSpec) -> Linear:
        """Every linear layer is read here, but an output layer that is tied to the embedding."""
        names, weights = [self._prefix + name for name in spec.names], self.weights
        bias = None
        if spec.has_bias:
            bias = weights.read(spec.shape[:1], *(f"{name}.bias" for name in names))
        if spec.is_quantizable:
            quantized = weights.quantized(spec.shape, bias, *names)
            if quantized is not None:
                return quantized
        weight = weights.read(spec.shape, *(f"{name}.weight" for name in names))
        return self.make_linear(weight, bias)

    def vector(self, spec: VectorSpec) -> Tensor:
        return self.weights.read(spec.shape, self._prefix + spec.name)

    def wide(self, spec: VectorSpec) -> Tensor:
        """A vector that is computed with in float32, whatever the type of the model."""
        return self.vector(spec).float()

    def norm(self, spec: VectorSpec | None) -> Tensor | None:
        """The weight of a norm, where there is one."""
        return None if spec is None else self.final_norm(spec)

    def final_norm(self, spec: VectorSpec) -> Tensor:
        weight = self.vector(spec)
        return weight.float() + self.norm_kind.offset if self.norm_kind.is_wide else weight


def summed(group: Group | None, tensor: Tensor) -> Tensor:
    """The sum of what all ranks have; in float32, where that of a type is not known to a group."""
    if group is None:
        return tensor
    wide = tensor.float() if tensor.dtype is torch.float16 else tensor
    group.all_reduce(wide)
    return wide.to(tensor.dtype)
