"""A weight format and an architecture that no path but the generic one computes."""

from dataclasses import dataclass, fields

from torch import Tensor
from torch.nn import functional

from penstock.engine.models.config import ModelConfig


class NegatedLinear:
    """Stores -W."""

    weight_format = "negated"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._negated = -weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(-x, self._negated, self._bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReversedConfig(ModelConfig):
    """Llama, with a flag that no path has heard of, and that torch need not do anything about."""

    is_reversed: bool = False


def reversed_config(config: ModelConfig) -> ReversedConfig:
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return ReversedConfig(**values, is_reversed=True)
