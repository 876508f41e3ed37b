"""The linear layers of `FusedModel`, by weight format: few rows in one kernel, many by cuBLAS.

Codes of weights are multiplied in one of four ways, by format and rows: see `FusedCodedLinear`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from penstock.engine.kernels.activation import silu_mul
from penstock.engine.kernels.codes import scaled
from penstock.engine.kernels.codes.numbers import dequantize
from penstock.engine.kernels.codes.skinny import skinny_grouped_linear
from penstock.engine.kernels.codes.tiles import tiled_linear
from penstock.engine.kernels.linear import MAX_ROWS, Scaled, skinny_linear
from penstock.engine.models.errors import UnsupportedWeightFormat
from penstock.engine.models.layers.coded import CodedLinear
from penstock.engine.models.layers.linear import Linear, PlainLinear, StackedLinear

# So much of a weight is dequantized at a time: half of the L2 cache of an H100 or H200, where it
# may still be when cuBLAS reads it; and in whole tiles of cuBLAS.
_SLAB_BYTES = 25_000_000
_SLAB_ROWS = 128
# Dequantizing the weights of Qwen3-8B, int4 in groups of 128, adds some 15 ms to a step, and tiles
# add 3 to 6 for each 256 rows: estimated at 256, as in tests/bench/gpu/ESTIMATE.md. So they are
# equal at 700 to 1,200.
MAX_TILED_ROWS = 512


class Around(TypedDict, total=False):
    """What is computed with a product: see `skinny_linear`."""

    eps: float
    residual: Tensor | None
    following: Tensor | None


class FusedLinear(ABC):
    """One linear layer on the GPU. "Few" is at most `penstock.engine.kernels.linear.MAX_ROWS`."""

    out_features: int

    @abstractmethod
    def few(self, x: Tensor | Scaled, out: Tensor, **around: Unpack[Around]) -> Scaled | None:
        """As `skinny_linear`: out = x' W^T + b + residual, x' being x or what its norm gives."""

    def few_gated(self, x: Tensor | Scaled, out: Tensor, *, eps: float) -> None:
        """out = silu(gate) * up of x or what its norm gives, where the layer stacks gate and up."""
        both = out.new_empty(len(out), self.out_features)
        self.few(x, both, eps=eps)
        silu_mul(both, out)

    @abstractmethod
    def many(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x W^T + b, in `out` if given."""


def product(linear: FusedLinear, x: Tensor) -> Tensor:
    """x W^T + b of any number of rows."""
    if len(x) > MAX_ROWS:
        return linear.many(x)
    out = x.new_empty(len(x), linear.out_features)
    linear.few(x, out)
    return out


class _FusedMatrix(FusedLinear):
    """A layer of one weight. skinny: `skinny_linear` or its like, of that weight."""

    def __init__(
        self, skinny: Callable[..., Scaled | None], out_features: int, bias: Tensor | None
    ) -> None:
        self._skinny = skinny
        self._bias = bias
        self.out_features = out_features

    def few(self, x: Tensor | Scaled, out: Tensor, **around: Unpack[Around]) -> Scaled | None:
        return self._skinny(x, out=out, bias=self._bias, **around)

    def few_gated(self, x: Tensor | Scaled, out: Tensor, *, eps: float) -> None:
        if self._bias is None:
            self._skinny(x, out=out, eps=eps, is_gated=True)
        else:
            super().few_gated(x, out, eps=eps)


class FusedPlainLinear(_FusedMatrix):
    def __init__(self, linear: PlainLinear) -> None:
        super().__init__(
            partial(skinny_linear, weight=linear.weight), linear.out_features, linear.bias
        )
        self._linear = linear

    def many(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            return self._linear(x)
        assert self._bias is None, "only the output layer writes to given memory, without a bias"
        return torch.mm(x, self._linear.weight.t(), out=out)


class FusedCodedLinear(_FusedMatrix):
    """Few rows: one kernel that reads codes. More, of FP8 with a scale by row: the matrix units,
    which multiply FP8 as it is. Of other codes, up to MAX_TILED_ROWS: tiles of the matrix units,
    whose weights are made of codes in registers; else cuBLAS, of a dequantized copy of the weight.

    The copy is made in every call, slab by slab, in memory that all layers share: torch's allocator
    gives each of them the same. It costs the codes' bytes read, and the plain weight's written and
    read again, at best in the cache: for thousands of rows that is little beside the product.
    """

    def __init__(self, linear: CodedLinear) -> None:
        weight = self._weight = linear.weight
        super().__init__(
            partial(skinny_grouped_linear, weight=weight), linear.out_features, linear.bias
        )

    def many(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if scaled.takes(self._weight, x.dtype):
            product = scaled.scaled_linear(x, self._weight, self._bias)
            return product if out is None else out.copy_(product)
        if out is None:
            out = x.new_empty(len(x), self.out_features)
        if len(x) <= MAX_TILED_ROWS:
            tiled_linear(x, self._weight, out, self._bias)
        else:
            self._dequantized(x, out)
        return out

    def _dequantized(self, x: Tensor, out: Tensor) -> None:
        columns = self._weight.columns
        tiles = _SLAB_BYTES // (columns * x.element_size() * _SLAB_ROWS)
        rows = min(self.out_features, max(1, tiles) * _SLAB_ROWS)
        slab = x.new_empty(rows, columns)
        for first in range(0, self.out_features, rows):
            part = out[:, first : first + rows]
            weight = slab[: part.shape[1]]
            dequantize(self._weight, first, weight)
            if self._bias is None:
                torch.mm(x, weight.t(), out=part)
            else:
                torch.addmm(self._bias[first : first + rows], x, weight.t(), out=part)


class FusedStackedLinear(FusedLinear):
    """Its parts, one after the other, into their columns of the output."""

    def __init__(self, linear: StackedLinear) -> None:
        self._parts = [fused_linear(part) for part in linear.parts]
        self.out_features = sum(part.out_features for part in self._parts)

    def few(self, x: Tensor | Scaled, out: Tensor, **around: Unpack[Around]) -> Scaled | None:
        assert around.get("following") is None, "a norm is of one part's outputs"
        sizes = [part.out_features for part in self._parts]
        outs = torch.split(out, sizes, dim=1)
        residual = around.get("residual")
        residuals = [None] * len(outs) if residual is None else torch.split(residual, sizes, dim=1)
        for part, columns, added in zip(self._parts, outs, residuals, strict=True):
            around["residual"] = added
            part.few(x, columns, **around)
        return None

    def many(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.cat([part.many(x) for part in self._parts], dim=1, out=out)


FUSED_PATH = "the GPU's fused step"
_BY_FORMAT: Mapping[str, Callable[[Any], FusedLinear]] = {
    PlainLinear.weight_format: FusedPlainLinear,
    CodedLinear.weight_format: FusedCodedLinear,
    StackedLinear.weight_format: FusedStackedLinear,
}


def fused_linear(linear: Linear) -> FusedLinear:
    """Returns what computes the layer on a GPU. Raises UnsupportedWeightFormat."""
    if (make := _BY_FORMAT.get(linear.weight_format)) is None:
        raise UnsupportedWeightFormat(linear.weight_format, FUSED_PATH, _BY_FORMAT)
    return make(linear)
