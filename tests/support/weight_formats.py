"""A weight format that no path but the generic one computes."""

from torch import Tensor
from torch.nn import functional


class NegatedLinear:
    """Stores -W."""

    weight_format = "negated"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._negated = -weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(-x, self._negated, self._bias)
