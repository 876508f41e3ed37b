"""A weight format and an architecture that no path but the generic one computes."""

from dataclasses import dataclass, fields

from torch import Tensor
from torch.nn import functional

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.layers.linear import tensor_bytes


class NegatedLinear:
    """Stores -W, in float64."""

    weight_format = "negated"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._negated = -weight.double()
        self._bias = bias
        self.num_bytes = tensor_bytes(self._negated, bias)

    def __call__(self, x: Tensor) -> Tensor:
        y = functional.linear(-x.double(), self._negated).to(x.dtype)
        return y if self._bias is None else y + self._bias


@dataclass(frozen=True, slots=True, kw_only=True)
class ReversedConfig(ModelConfig):
    """Llama, with a flag that no path has heard of, and that torch need not do anything about."""

    is_reversed: bool = False


def reversed_config(config: ModelConfig) -> ReversedConfig:
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return ReversedConfig(**values, is_reversed=True)
