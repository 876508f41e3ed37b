"""`PartReader`: reads the tensors that a part declares."""

from torch import Tensor

from penstock.engine.models.layers.linear import Linear, MakeLinear
from penstock.engine.models.parts.norm.config import NormKind
from penstock.engine.models.parts.source import WeightSource
from penstock.engine.models.parts.tensors import LinearSpec, VectorSpec


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
