"""Rounds weights to codes of 8 or 4 bits, with a scale for each group of 32 along in_features, or
to FP8, with a scale for each row.

No data is needed but the weights. It knows neither names of layers nor where weights come from.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.config import Quantization
from penstock.engine.models.layers.grouped import packed_nibbles

GROUP_SIZE = 32
# Codes of 4 bits stand for these: dense near zero, where most weights of a group are. Evenly spaced
# ones have a fifth more KL divergence on the demo model.
# Source: `kvalues_iq4nl` of llama.cpp, fitted to weights of Gaussian groups.
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# A band of rows whose temporaries stay in a core's cache; on a GPU, one that occupies all of it.
_BAND_ELEMENTS = 2**17
_GPU_BAND_ELEMENTS = 2**24
# The group's largest weight, in codes, for each scale that is tried: with these, the KL divergence
# is a fifth below that of 127 alone. At most 127.5, so that no weight is off by more than half a
# step; products may rely on it that -128 is unused.
_LARGEST_CODES = (121.0, 122.0, 123.0, 124.0, 125.0, 126.0, 126.5, 127.0, 127.4)
# By how much the group's largest weight may exceed the outermost level; more than these few lower
# the error by less than a percent.
_EXCESSES = (0.95, 1.0, 1.05, 1.1)
_SMALLEST_SCALE = 2.0**-24  # of float16
_LARGEST_WEIGHT = 65504 * 126.0


_FP8 = torch.float8_e4m3fn
_LARGEST_FP8 = torch.finfo(_FP8).max


class Codes(NamedTuple):
    """As `GroupedLinear` has them, without zeros; or as `Fp8Linear`, with a scale for each row."""

    codes: Tensor
    scales: Tensor

    @classmethod
    def allocated(
        cls, kind: Quantization, rows: int, columns: int, allocate: "Allocate"
    ) -> "Codes":
        if kind is Quantization.FP8:
            return cls(allocate((rows, columns), _FP8), allocate((rows, 1), torch.float32))
        width, dtype = (columns, torch.int8) if kind.bits == 8 else (-(-columns // 2), torch.uint8)
        scales = allocate((rows, -(-columns // GROUP_SIZE)), torch.float16)
        return cls(allocate((rows, width), dtype), scales)


class NotRoundable(Exception):
    """A weight is NaN or infinite, or too large for a scale in float16."""


Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


def rounded(weight: Tensor, kind: Quantization, allocate: Allocate, num_threads: int = 1) -> Codes:
    """weight: (out_features, in_features), of any float type, on the device that computes; the
    result is where `allocate` has it. Those of 4 bits are for `LEVELS`. Besides the result it needs
    a few MB for each thread, on a GPU a GB. Raises NotRoundable."""
    rows, columns = weight.shape
    result = Codes.allocated(kind, rows, columns, allocate)
    on_cpu = weight.device.type == "cpu"
    band = max(1, (_BAND_ELEMENTS if on_cpu else _GPU_BAND_ELEMENTS) // columns)

    @torch.inference_mode()
    def round_band(first: int) -> None:
        rows = slice(first, first + band)
        codes, scales = _rounded_band(weight[rows].float(), kind)
        result.codes[rows] = codes.to(result.codes.device)
        result.scales[rows] = scales.to(result.scales.device)

    with _one_thread_each(), ThreadPoolExecutor(num_threads if on_cpu else 1) as pool:
        list(pool.map(round_band, range(0, rows, band)))
    return result


def _rounded_band(part: Tensor, kind: Quantization) -> tuple[Tensor, Tensor]:
    """Returns the codes and scales of some rows in float32."""
    rows, columns = part.shape
    if kind is Quantization.FP8:
        return _round_fp8(part)
    groups = -(-columns // GROUP_SIZE)
    part = functional.pad(part, (0, groups * GROUP_SIZE - columns))
    # A group is a column, so that sums over groups add long rows.
    codes, scales = (_round8 if kind is Quantization.INT8 else _round4)(
        part.view(-1, GROUP_SIZE).t()
    )
    codes = codes.t().reshape(rows, -1)[:, :columns]
    return codes if kind is Quantization.INT8 else packed_nibbles(codes), scales.view(rows, groups)


def _round_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: (rows, columns) float32. The largest weight of a row is the largest number of FP8."""
    _, largest = _extremes(x.t())
    scales = (largest / _LARGEST_FP8).clamp_(min=_SMALLEST_SCALE).unsqueeze(1)
    return (x / scales).clamp_(-_LARGEST_FP8, _LARGEST_FP8).to(_FP8), scales


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Torch's operators do not start threads of their own, in threads that start in here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _round8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: (GROUP_SIZE, groups) float32. Of a few scales that of the least squared error."""
    x = x.contiguous()
    _, largest = _extremes(x)
    best = torch.full_like(largest, torch.inf)
    best_scale = torch.zeros_like(largest)
    for code in _LARGEST_CODES:
        scale = (largest / code).clamp_(min=_SMALLEST_SCALE).half().float()
        # float16 may have rounded it down; the next one is a little more.
        is_short = largest > scale * 127.5
        scale = torch.where(is_short, _next_half(scale), scale)
        codes = (x / scale).round_()
        error = codes.mul_(scale).sub_(x).square_().sum(0)
        best_scale = torch.where(error < best, scale, best_scale)
        best = torch.minimum(best, error)
    codes = (x / best_scale).round_().clamp_(-127, 127).to(torch.int8)
    return codes, best_scale.half()


def _round4(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: (GROUP_SIZE, groups) float32. The scale that is least in squared error, weighted so that
    large weights count more; it is negative where the largest weight is better at the other end.

    Source: `make_qx_quants` and `quantize_row_iq4_nl_impl` of llama.cpp, whose idea it is to try a
    few scales, and to fit each to the codes that it leads to; the weighting is that of Q4_K.
    """
    x = x.contiguous()
    highest, largest = _extremes(x)
    size = torch.where(largest > 0, largest, 1.0)
    unit = x / size  # from -1 to 1, so that no square underflows
    importance = unit.abs() + unit.square().mean(0).sqrt_()
    weighted = importance * unit
    codes, levels = _tables(x.device)
    sign = torch.where(highest == largest, 1.0, -1.0)
    best = torch.full_like(largest, -1.0)
    scale = torch.zeros_like(largest)
    for end in (LEVELS[0], LEVELS[-1]):
        for excess in _EXCESSES:
            numbers = _looked_up(unit * (sign * (end * excess)), levels)
            along = (weighted * numbers).sum(0)
            square = numbers.square_().mul_(importance).sum(0)
            gain = along.square() / square  # what of the weighted square the codes explain
            scale = torch.where(gain > best, along / square, scale)
            best = torch.maximum(best, gain)
    scales = torch.where(largest > 0, scale * size, 0.0).half()
    divisor = torch.where(scales == 0, 1.0, scales.float())
    return _looked_up(x / divisor, codes), scales


def _looked_up(numbers: Tensor, table: Tensor) -> Tensor:
    """Looks up each number, rounded to an integer from -128 to 127, in the table."""
    indices = numbers.add_(128.5).clamp_(0, 255).to(torch.int32)
    return table.index_select(0, indices.flatten()).view_as(numbers)


def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """For each integer from -128 to 127 the code of the level nearest to it, and that level."""
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=device)
    integers = torch.arange(-128.0, 128.0, device=device)
    codes = torch.bucketize(integers, (levels[1:] + levels[:-1]) / 2)
    return codes.to(torch.uint8), levels[codes]


def _extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each group's largest value, and largest absolute value. Raises NotRoundable."""
    highest = x.amax(0)
    largest = torch.maximum(highest, -x.amin(0))
    if not bool(largest.amax() <= _LARGEST_WEIGHT):  # nor is NaN
        raise NotRoundable
    return highest, largest


def _next_half(scale: Tensor) -> Tensor:
    """Returns the next larger number of float16. scale: positive."""
    return (scale.half().view(torch.int16) + 1).view(torch.float16).float()
