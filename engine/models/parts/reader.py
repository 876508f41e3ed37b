"""`PartReader` reads the tensors that a part declares from a `WeightSource`, and `PartLayer` has
them."""

from collections.abc import Callable
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.models.layers.linear import Linear, MakeLinear, tensor_bytes
from penstock.engine.models.parts.tensors import LinearSpec, NormKind, Part, VectorSpec
from penstock.engine.ranks.group import Group

# Allocates the memory that a weight is read into, on the device and in the type of its choice.
Empty = Callable[[tuple[int, ...]], Tensor]
# The rows of a table for some ids, (T, columns), on the table's device.
TableRows = Callable[[Tensor], Tensor]
Settings = TypeVar("Settings", bound=Part)


class WeightSource(Protocol):
    def read(self, shape: tuple[int, ...], *names: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensors `names` of the checkpoint, stacked along their first dimension to `shape`.
        dtype: None for that of the model."""
        ...

    def table(self, shape: tuple[int, int], name: str) -> TableRows:
        """One of which a step reads few rows: in the type that it is stored in, and where there is
        a file, mapped from it."""
        return rows_of(self.read(shape, name))

    def quantized(self, shape: tuple[int, int], bias: Tensor | None, *names: str) -> Linear | None:
        """The linear layer of these, in a format of its own; None where the weights are plain.

        shape: (out_features, in_features). names: of layers, such as "model.layers.0.mlp.up_proj".
        """
        return None


def rows_of(table: Tensor) -> TableRows:
    return lambda ids: functional.embedding(ids.to(table.device), table)


class PartReader:
    """prefix: of the names of a layer's tensors; empty outside of layers. norm: of the model's.
    make_linear: makes the linear layers whose weights are plain. group: of ranks that have other
    parts of the same layers."""

    def __init__(
        self,
        weights: WeightSource,
        make_linear: MakeLinear,
        norm: NormKind,
        prefix: str = "",
        group: Group | None = None,
    ) -> None:
        self.weights = weights
        self.make_linear = make_linear
        self.group = group
        self.eps = norm.eps
        self._norm = norm
        self._prefix = prefix

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
        return self.make_linear(self.weight(spec), bias)

    def weight(self, spec: LinearSpec) -> Tensor:
        """Reads the plain weight of a linear layer."""
        names = (f"{self._prefix}{name}.weight" for name in spec.names)
        return self.weights.read(spec.shape, *names)

    def vector(self, spec: VectorSpec) -> Tensor:
        # What is computed with in float32 is not rounded to the model's type before.
        is_wide = self._norm.is_wide if spec.is_norm else spec.is_wide
        dtype = torch.float32 if is_wide else None
        vector = self.weights.read(spec.shape, self._prefix + spec.name, dtype=dtype)
        if spec.is_norm and self._norm.is_centred:
            bias = torch.zeros_like(vector)
            if spec.has_bias:
                bias = self.weights.read(spec.shape, self._prefix + spec.bias_name, dtype=dtype)
            vector = torch.stack((vector, bias))
        if not is_wide:
            return vector
        return vector.float() + (self._norm.offset if spec.is_norm else 0.0)


class PartLayer(Generic[Settings]):
    """A part with its weights: it has each of the linear layers and vectors that its settings
    declare as an attribute of that name. group: see `PartReader`."""

    def __init__(self, config: Settings, reader: PartReader) -> None:
        self.config = config
        self.eps, self.group = reader.eps, reader.group
        for name, linear in config.linears.items():
            setattr(self, name, reader.linear(linear))
        for name, vector in config.vectors.items():
            setattr(self, name, reader.vector(vector))

    @classmethod
    def read(cls, config: Settings | None, reader: PartReader, **options: Any) -> Self | None:
        """Returns None where a layer has no such part."""
        return None if config is None else cls(config, reader, **options)

    @property
    def linears(self) -> dict[str, Linear]:
        return {name: getattr(self, name) for name in self.config.linears}

    @property
    def num_bytes(self) -> int:
        """Without the experts that a router chooses from."""
        vectors = tensor_bytes(*(getattr(self, name) for name in self.config.vectors))
        return vectors + self._linear_bytes(are_routed=False)

    @property
    def expert_bytes(self) -> int:
        """The bytes of the experts that a router chooses from."""
        return self._linear_bytes(are_routed=True)

    def _linear_bytes(self, *, are_routed: bool) -> int:
        specs, linears = self.config.linears, self.linears
        own = (name for name in specs if (specs[name].num_used is not None) is are_routed)
        return sum(linears[name].num_bytes for name in own)


def summed(group: Group | None, tensor: Tensor) -> Tensor:
    """The sum of what all ranks have; in float32, where that of a type is not known to a group."""
    if group is None:
        return tensor
    wide = tensor.float() if tensor.dtype is torch.float16 else tensor
    group.all_reduce(wide)
    return wide.to(tensor.dtype)
