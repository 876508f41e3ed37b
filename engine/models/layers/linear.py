"""Linear layers in torch, by the layout of their weights."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Linear(Protocol):
    """y = x W^T + b for x of (T, in_features). Owns W in whatever layout computes it best."""

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class PackedLinear:
    """The weight in oneDNN's blocked layout, made once at load; the original is not kept.

    `functional.linear` repacks a bfloat16 weight in every call, which at a few rows costs more
    than the product itself. These two operators are torch's own (Inductor emits them), but private.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._linear(x, self._packed, self._bias, "none", [], "")
        return y


def can_pack(device: torch.device) -> bool:
    """Private operators may vanish with a release: then `PlainLinear` is right, only slower."""
    return (
        device.type == "cpu"
        and torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
