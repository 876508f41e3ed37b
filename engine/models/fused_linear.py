"""The linear layers of `FusedModel`, by weight format: few rows in one kernel, many by cuBLAS."""

from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.kernels.activation import silu_mul
from penstock.engine.kernels.linear import skinny_linear
from penstock.engine.models.fused_grouped import FusedGroupedLinear
from penstock.engine.models.layers.grouped import GroupedLinear, StackedLinear
from penstock.engine.models.layers.linear import LinearProducts, PlainLinear
from penstock.engine.models.quantization.schemes import LEVELS_FORMAT


class FusedLinear(Protocol):
    """One linear layer on the GPU. "Few" is at most `penstock.engine.kernels.linear.MAX_ROWS`."""

    @property
    def out_features(self) -> int: ...

    def few(
        self,
        x: Tensor,
        out: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
    ) -> None:
        """As `skinny_linear`: out = x' W^T + b + residual, x' being x or its RMSNorm."""
        ...

    def few_gated(self, x: Tensor, out: Tensor, *, norm: Tensor, eps: float) -> None:
        """out = silu(gate) * up of the RMSNorm of x, where the layer stacks gate and up."""
        ...

    def many(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x W^T + b, in `out` if given."""
        ...


class FusedPlainLinear:
    def __init__(self, linear: PlainLinear) -> None:
        self._linear = linear
        self._weight, self._bias = linear.weight, linear.bias
        self.out_features = len(linear.weight)

    def few(
        self,
        x: Tensor,
        out: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
    ) -> None:
        skinny_linear(x, self._weight, out, norm=norm, eps=eps, bias=self._bias, residual=residual)

    def few_gated(self, x: Tensor, out: Tensor, *, norm: Tensor, eps: float) -> None:
        if self._bias is None:
            skinny_linear(x, self._weight, out, norm=norm, eps=eps, is_gated=True)
            return
        both = x.new_empty(len(x), self.out_features)
        self.few(x, both, norm=norm, eps=eps)
        silu_mul(both, out)

    def many(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            return self._linear(x)
        assert self._bias is None, "only the output layer writes to given memory, without a bias"
        return torch.mm(x, self._weight.t(), out=out)


class FusedStackedLinear:
    """Its parts, one after the other, into their columns of the output."""

    def __init__(self, linear: StackedLinear) -> None:
        self._parts = [FUSED_LINEARS.of(part) for part in linear.parts]
        self.out_features = sum(part.out_features for part in self._parts)

    def few(
        self,
        x: Tensor,
        out: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
    ) -> None:
        sizes = [part.out_features for part in self._parts]
        outs = torch.split(out, sizes, dim=1)
        residuals = [None] * len(outs) if residual is None else torch.split(residual, sizes, dim=1)
        for part, columns, added in zip(self._parts, outs, residuals, strict=True):
            part.few(x, columns, norm=norm, eps=eps, residual=added)

    def few_gated(self, x: Tensor, out: Tensor, *, norm: Tensor, eps: float) -> None:
        both = x.new_empty(len(x), self.out_features)
        self.few(x, both, norm=norm, eps=eps)
        silu_mul(both, out)

    def many(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.cat([part.many(x) for part in self._parts], dim=1, out=out)


FUSED_PATH = "the GPU's fused step"


def _grouped(linear: GroupedLinear) -> FusedLinear:
    return FusedGroupedLinear(linear, FUSED_PATH)


FUSED_LINEARS = LinearProducts[FusedLinear](
    FUSED_PATH,
    {
        PlainLinear.weight_format: FusedPlainLinear,
        "int8": _grouped,
        **dict.fromkeys(("int4", "int4 asymmetric", LEVELS_FORMAT), _grouped),
        StackedLinear.weight_format: FusedStackedLinear,
    },
)
