"""`CodedLinear`: a layer whose weight is in the form that a GPU's kernels read.

Codes are put in that form as they are read, so that a device never holds them twice.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.kernels.codes.weight import CodedWeight
from penstock.engine.models.layers.linear import bands, tensor_bytes
from penstock.engine.models.layers.weight_formats import CodedLayout

_MIDDLE = 8


class _SlowLinear(ABC):
    """A layer that widens its weight in each call, in the type of x."""

    in_features: int
    bias: Tensor | None

    @property
    @abstractmethod
    def out_features(self) -> int: ...

    @abstractmethod
    def write_weight(self, out: Tensor) -> None: ...

    def __call__(self, x: Tensor) -> Tensor:
        weight = x.new_empty(self.out_features, self.in_features)
        self.write_weight(weight)
        return functional.linear(x, weight, self.bias)


@dataclass(eq=False)
class CodedLinear(_SlowLinear):
    weight: CodedWeight
    bias: Tensor | None
    weight_format = "coded"

    def __post_init__(self) -> None:
        weight = self.weight
        self.in_features = weight.columns
        self.num_bytes = tensor_bytes(weight.codes, weight.scales, weight.zeros, self.bias)

    @property
    def out_features(self) -> int:
        return self.weight.out_features

    def rows(self, first: int, end: int) -> "CodedLinear":
        """See `StoredLinear`."""
        bias = None if self.bias is None else self.bias[first:end]
        return CodedLinear(_rows(self.weight, first, end), bias)

    def on_gpu(self, device: torch.device) -> "CodedLinear":
        return self

    def write_weight(self, out: Tensor) -> None:
        """See `StoredLinear`."""
        for start, stop in bands(self.out_features):
            out[start:stop] = _numbers(_rows(self.weight, start, stop))


class CodesLinear(_SlowLinear):
    """A layer of codes that a GPU may compute as a `CodedLinear`, and the compiled CPU step."""

    codes: Tensor
    scales: Tensor

    @property
    def out_features(self) -> int:
        return len(self.codes)

    @abstractmethod
    def coded_weight(self, device: torch.device) -> CodedWeight | None:
        """Returns the codes on the device, in the form that is made where they are; None where no
        kernel has such groups."""

    def on_gpu(self, device: torch.device) -> CodedLinear | None:
        """See `StoredLinear`."""
        weight = self.coded_weight(device)
        return None if weight is None else CodedLinear(weight, self.bias)

    def release(self) -> None:
        """Frees what has been packed; the layer cannot compute any more."""
        self.codes, self.scales = self.codes.new_empty(0), self.scales.new_empty(0)


def coded_weight(
    layout: CodedLayout,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    levels: Tensor | None,
    device: torch.device,
) -> CodedWeight:
    """codes: (out_features, bytes of a row), two of 4 bits to a byte as in `GroupedLinear`. scales,
    zeros: (out_features, groups)."""
    if missing := layout.row_bytes - codes.shape[1]:
        codes = functional.pad(codes, (0, missing))
    if layout.bits == 4:
        halves = torch.stack((codes & 15, codes >> 4), dim=-1)
        low, high = halves.view(len(codes), -1, 2, layout.run).unbind(2)
        codes = (low | high << 4).flatten(1)
    if zeros is not None:
        zeros = zeros.float() - (0 if layout.bits == 8 else _MIDDLE)
    is_one = layout.group_size >= layout.columns
    return CodedWeight(
        bits=layout.bits,
        codes=codes.contiguous().to(device),
        scales=_by_group(scales, layout.is_paired).to(device),
        zeros=None if zeros is None else _by_group(zeros, layout.is_paired).to(device),
        group_size=layout.padded_columns if is_one else layout.group_size,
        run=layout.run,
        columns=layout.columns,
        levels=None if levels is None else _words(levels),
    )


def _by_group(values: Tensor, is_paired: bool) -> Tensor:
    """Returns the table of a `CodedWeight`. values: (out_features, groups)."""
    if not is_paired:
        return values.float().t().contiguous()
    padded = functional.pad(values.half(), (0, values.shape[1] % 2))
    return padded.view(torch.int32).t().contiguous()


def _words(levels: Tensor) -> tuple[int, int, int, int]:
    """Returns four words of (16,) int8, the first level in the lowest byte."""
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
    """Returns W in float32."""
    numbers = _unscaled(weight)[:, : weight.columns]
    if weight.zeros is not None:
        numbers = numbers - _by_column(weight, weight.zeros)
    return numbers * _by_column(weight, weight.scales)


def _unscaled(weight: CodedWeight) -> Tensor:
    """Returns the numbers without scales and zeros: (out_features, row_bytes * 8 / bits)."""
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
    """Returns a table of groups as (out_features, columns)."""
    by_group = table.t().contiguous()
    if table.dtype is torch.int32:
        by_group = by_group.view(torch.float16)
    by_column = by_group.float().repeat_interleave(weight.group_size, dim=1)
    return by_column[:, : weight.columns]
