"""`CodedLinear`: a layer whose weight is in the form that a GPU's kernels read.

Codes are put in that form as they are read, so that a device never holds them twice.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.kernels.codes.weight import CodedWeight
from penstock.engine.models.formats.scheme import Awq, Blocks, Fp4, Fp8, Gptq, Integers, Scheme
from penstock.engine.models.layers.fp8 import Fp8Linear
from penstock.engine.models.layers.grouped import GroupedLinear, StackedLinear
from penstock.engine.models.layers.linear import (
    Linear,
    PlainLinear,
    StoredLinear,
    bands,
    tensor_bytes,
)

# Columns whose codes are in neighbouring bytes, by bits: in registers, 64 bytes of 8 bits take as
# much as 32 of 4. A product on the matrix units takes 16.
_RUNS = {8: (64, 32, 16), 4: (32, 16)}
_MIDDLE = 8
_FLOAT32_BYTES = 4


class CodedLinear:
    weight_format = "coded"

    def __init__(self, weight: CodedWeight, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.num_bytes = tensor_bytes(weight.codes, weight.scales, weight.zeros, bias)

    @property
    def out_features(self) -> int:
        return self.weight.out_features

    def rows(self, first: int, end: int) -> "CodedLinear":
        """See `StoredLinear`."""
        bias = None if self.bias is None else self.bias[first:end]
        return CodedLinear(_rows(self.weight, first, end), bias)

    def write_weight(self, out: Tensor) -> None:
        """See `StoredLinear`."""
        for start, stop in bands(self.out_features):
            out[start:stop] = _numbers(_rows(self.weight, start, stop))

    def __call__(self, x: Tensor) -> Tensor:
        """Slowly: the weights are widened in each call."""
        shape = (self.out_features, self.weight.columns)
        weight = torch.empty(shape, dtype=x.dtype, device=x.device)
        self.write_weight(weight)
        return functional.linear(x, weight, self.bias)


class OnGpu:
    """See `Kept`: all codes whose groups fit the kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def layer(self, linear: StoredLinear) -> Linear | None:
        if isinstance(linear, PlainLinear):
            return linear
        if isinstance(linear, StackedLinear):
            parts = [part for each in linear.parts if (part := self._stored(each)) is not None]
            return StackedLinear(parts) if len(parts) == len(linear.parts) else None
        return self._stored(linear)

    def num_bytes(self, scheme: Scheme, out_features: int, in_features: int) -> int | None:
        layout = _layout_of(scheme, in_features)
        return None if layout is None else layout.num_bytes(out_features, in_features)

    def _stored(self, linear: StoredLinear) -> StoredLinear | None:
        if isinstance(linear, PlainLinear | CodedLinear):
            return linear
        assert isinstance(linear, GroupedLinear | Fp8Linear), linear
        weight = coded_weight(linear, self._device)
        return None if weight is None else CodedLinear(weight, linear.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """group_size: columns. is_paired: scales and zeros are float16, of two groups in a word."""

    bits: int
    group_size: int
    run: int
    is_paired: bool
    has_zeros: bool

    def padded(self, columns: int) -> int:
        return -(-columns // (2 * self.run)) * 2 * self.run

    def num_bytes(self, out_features: int, columns: int) -> int:
        """As `CodedLinear.num_bytes`, without the bias."""
        groups = -(-columns // self.group_size)
        words = -(-groups // 2) if self.is_paired else groups
        tables = words * _FLOAT32_BYTES * (1 + self.has_zeros)
        return out_features * (self.padded(columns) * self.bits // 8 + tables)


def _layout(
    bits: int, group_size: int, columns: int, *, has_zeros: bool, has_halves: bool
) -> _Layout | None:
    """None where no run divides the groups. has_halves: scales are float16."""
    is_one = group_size >= columns
    run = next((run for run in _RUNS[bits] if is_one or group_size % run == 0), None)
    if run is None:
        return None
    return _Layout(
        bits=bits,
        group_size=columns if is_one else group_size,
        run=run,
        is_paired=bits == 4 and group_size == run and not is_one and has_halves,
        has_zeros=has_zeros,
    )


def _layout_of(scheme: Scheme, columns: int) -> _Layout | None:
    if isinstance(scheme, Fp8):
        group_size = scheme.block[1] if scheme.block else columns
        return _layout(8, group_size, columns, has_zeros=False, has_halves=False)
    if isinstance(scheme, Blocks):
        if not scheme.is_grouped:
            return None
        return _layout(scheme.bits, scheme.group_size, columns, has_zeros=False, has_halves=True)
    assert isinstance(scheme, Awq | Fp4 | Gptq | Integers), scheme
    bits = 8 if scheme.weight_format.startswith("int8") else 4
    has_zeros = isinstance(scheme, Awq) or (
        isinstance(scheme, Integers) and not scheme.is_symmetric
    )
    # e4m3 times a float32 fills a float32.
    has_halves = not (isinstance(scheme, Fp4) and scheme.global_scale)
    group_size = scheme.group_size or columns
    return _layout(bits, group_size, columns, has_zeros=has_zeros, has_halves=has_halves)


def coded_weight(linear: GroupedLinear | Fp8Linear, device: torch.device) -> CodedWeight | None:
    """On the device; the form is made where the codes are. None where no kernel has such groups."""
    if isinstance(linear, Fp8Linear):
        return _of_fp8(linear, device)
    if linear.blocks is not None:
        return None
    layout = _layout(
        linear.bits,
        linear.group_size,
        linear.in_features,
        has_zeros=linear.zeros is not None,
        has_halves=linear.scales.dtype is torch.float16,
    )
    if layout is None:
        return None
    codes = _padded(linear.codes, layout.padded(linear.in_features) * linear.bits // 8)
    if linear.bits == 4:
        halves = torch.stack((codes & 15, codes >> 4), dim=-1)
        low, high = halves.view(len(codes), -1, 2, layout.run).unbind(2)
        codes = (low | high << 4).flatten(1)
    zeros = linear.zeros
    if zeros is not None:
        zeros = zeros.float() - (0 if linear.bits == 8 else _MIDDLE)
    return _weight(
        layout,
        codes,
        _by_group(linear.scales, layout.is_paired),
        None if zeros is None else _by_group(zeros, layout.is_paired),
        linear.in_features,
        device,
        None if linear.levels is None else _words(linear.levels),
    )


def _of_fp8(linear: Fp8Linear, device: torch.device) -> CodedWeight | None:
    rows, columns = linear.codes.shape
    height, width = linear.block
    layout = _layout(8, width, columns, has_zeros=False, has_halves=False)
    if layout is None:
        return None
    scales = linear.scales.repeat_interleave(height, dim=0)[:rows]
    codes = _padded(linear.codes.view(torch.uint8), layout.padded(columns))
    return _weight(layout, codes, _by_group(scales, False), None, columns, device, None)


def _weight(
    layout: _Layout,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    columns: int,
    device: torch.device,
    levels: tuple[int, int, int, int] | None,
) -> CodedWeight:
    return CodedWeight(
        bits=layout.bits,
        codes=codes.contiguous().to(device),
        scales=scales.to(device),
        zeros=None if zeros is None else zeros.to(device),
        group_size=layout.padded(columns) if layout.group_size >= columns else layout.group_size,
        run=layout.run,
        columns=columns,
        levels=levels,
    )


def _padded(codes: Tensor, row_bytes: int) -> Tensor:
    missing = row_bytes - codes.shape[1]
    return functional.pad(codes, (0, missing)) if missing else codes


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


def _rows(weight: CodedWeight, start: int, stop: int) -> CodedWeight:
    zeros = weight.zeros
    return replace(
        weight,
        codes=weight.codes[start:stop],
        scales=weight.scales[:, start:stop],
        zeros=None if zeros is None else zeros[:, start:stop],
    )


def _numbers(weight: CodedWeight) -> Tensor:
    """W in float32."""
    numbers = _of_codes(weight)[:, : weight.columns]
    if weight.zeros is not None:
        numbers = numbers - _by_column(weight, weight.zeros)
    return numbers * _by_column(weight, weight.scales)


def _of_codes(weight: CodedWeight) -> Tensor:
    """What the codes stand for without scales and zeros: (out_features, row_bytes * 8 / bits)."""
    codes = weight.codes
    if weight.bits == 8:
        return (codes.view(torch.float8_e4m3fn) if codes.dtype is torch.uint8 else codes).float()
    runs = codes.view(len(codes), -1, weight.run)
    halves = torch.stack((runs & 15, runs >> 4), dim=2).flatten(1)
    if weight.levels is None:
        return halves.float() - _MIDDLE
    levels = torch.tensor(weight.levels, dtype=torch.int32).view(torch.int8)
    return levels.to(codes.device).float()[halves.long()]


def _by_column(weight: CodedWeight, table: Tensor) -> Tensor:
    """A table of groups as (out_features, columns)."""
    of_groups = table.t().contiguous()
    if table.dtype is torch.int32:
        of_groups = of_groups.view(torch.float16)
    by_column = of_groups.float().repeat_interleave(weight.group_size, dim=1)
    return by_column[:, : weight.columns]
