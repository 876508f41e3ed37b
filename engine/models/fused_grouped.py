"""`FusedGroupedLinear`: codes of 8 and 4 bits on the GPU."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.kernels.activation import silu_mul
from penstock.engine.kernels.codes.dequantize import dequantize
from penstock.engine.kernels.codes.skinny import skinny_grouped_linear
from penstock.engine.kernels.codes.weight import CodedWeight
from penstock.engine.kernels.linear import MAX_ROWS
from penstock.engine.models.errors import UnsupportedWeightFormat
from penstock.engine.models.layers.grouped import GroupedLinear

# Columns whose codes are in neighbouring bytes, by bits: in registers, 64 bytes of 8 bits take as
# much as 32 of 4. A product on the matrix units takes 16.
_RUNS = {8: (64, 32, 16), 4: (32, 16)}
_MIDDLE = 8
# Of a weight that is dequantized at a time: half of the L2 cache of an H100 or H200, so that it may
# still be there when cuBLAS reads it; and in whole tiles of cuBLAS.
_SLAB_BYTES = 25_000_000
_SLAB_ROWS = 128


# Up to so many rows, reading the codes for each 16 of them takes less time than dequantizing, as
# estimated.
_MANY_ROWS = 64


class FusedGroupedLinear:
    """Few rows: one kernel that reads codes. Many: cuBLAS, of a dequantized copy of the weight.

    The copy is made in every call, slab by slab, in memory that all layers share: torch's allocator
    gives each of them the same. It costs the codes' bytes read, and the plain weight's written and
    read again, at best in the cache. For thousands of rows that is little beside the product; for
    17 to some 500 a step is slower than with plain weights (see tests/bench/gpu/ESTIMATE.md), until
    a kernel for so many rows makes numbers of codes itself. It is the first step because it is
    exact, short, and as fast as cuBLAS where the product is large.
    """

    def __init__(self, linear: GroupedLinear, path: str) -> None:
        """Moves the layer's codes: it cannot compute any more. Raises UnsupportedWeightFormat."""
        self._weight, self._bias = _coded_weight(linear, path), linear.bias
        self.out_features = self._weight.out_features

    def few(
        self,
        x: Tensor,
        out: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
    ) -> None:
        skinny_grouped_linear(
            x, self._weight, out, norm=norm, eps=eps, bias=self._bias, residual=residual
        )

    def few_gated(self, x: Tensor, out: Tensor, *, norm: Tensor, eps: float) -> None:
        if self._bias is None:
            skinny_grouped_linear(x, self._weight, out, norm=norm, eps=eps, is_gated=True)
            return
        both = x.new_empty(len(x), self.out_features)
        self.few(x, both, norm=norm, eps=eps)
        silu_mul(both, out)

    def many(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = x.new_empty(len(x), self.out_features)
        if len(x) > _MANY_ROWS:
            self._dequantized(x, out)
            return out
        for rows, target in zip(torch.split(x, MAX_ROWS), torch.split(out, MAX_ROWS), strict=True):
            skinny_grouped_linear(rows, self._weight, target, bias=self._bias)
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


# Of the layers whose codes were moved: a model is measured by one FusedModel and served by another.
_MOVED: WeakKeyDictionary[GroupedLinear, CodedWeight] = WeakKeyDictionary()


def _coded_weight(linear: GroupedLinear, path: str) -> CodedWeight:
    if linear not in _MOVED:
        _MOVED[linear] = coded_weight(linear, path)
        linear.codes, linear.scales = linear.codes.new_empty(0), linear.scales.new_empty(0)
        linear.zeros = None
    return _MOVED[linear]


def coded_weight(linear: GroupedLinear, path: str) -> CodedWeight:
    """The weight as kernels read it; path: for UnsupportedWeightFormat, which it may raise."""
    size = linear.group_size
    is_one_group = size >= linear.in_features
    runs = _RUNS[linear.bits]
    run = runs[0] if is_one_group else next((run for run in runs if size % run == 0), None)
    if run is None:
        name = f"{linear.weight_format} in groups of {size}"
        sizes = [f"{linear.weight_format} in groups of a multiple of {runs[-1]}"]
        raise UnsupportedWeightFormat(name, path, sizes)
    columns = -(-linear.in_features // (2 * run)) * 2 * run
    codes = functional.pad(linear.codes, (0, columns * linear.bits // 8 - linear.codes.shape[1]))
    if linear.bits == 4:
        halves = torch.stack((codes & 15, codes >> 4), dim=-1)
        low, high = halves.view(len(codes), -1, 2, run).unbind(2)
        codes = (low | high << 4).flatten(1)
    zeros = linear.zeros
    if zeros is not None:
        zeros = zeros.float() - (0 if linear.bits == 8 else _MIDDLE)
    is_paired = linear.bits == 4 and size == run and linear.scales.dtype is torch.float16
    return CodedWeight(
        bits=linear.bits,
        codes=codes.contiguous(),
        scales=_by_group(linear.scales, is_paired),
        zeros=None if zeros is None else _by_group(zeros, is_paired),
        group_size=columns if is_one_group else size,
        run=run,
        columns=linear.in_features,
        levels=None if linear.levels is None else _words(linear.levels),
    )


def _by_group(values: Tensor, is_paired: bool) -> Tensor:
    """Of (out_features, groups): the table of a `CodedWeight`."""
    if not is_paired:
        return values.float().t().contiguous()
    padded = functional.pad(values.half(), (0, values.shape[1] % 2))
    return padded.view(torch.int32).t().contiguous()


def _words(levels: Tensor) -> tuple[int, int, int, int]:
    """Of (16,) int8: four words, the first level in the lowest byte."""
    first, second, third, fourth = levels.cpu().contiguous().view(torch.int32).tolist()
    return first, second, third, fourth
