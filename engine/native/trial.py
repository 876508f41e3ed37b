"""Tries what a library multiplies with on this machine, before a model is packed for it.

A way to multiply (products/ways.h) whose results differ from torch's, or from those of a row alone,
is refused with a line in the log, and so is one that takes longer than vectors: a processor's flags
promise neither. Nor do they say how well it prefetches weights by itself: that is timed too.
"""

import ctypes
import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import Structure, c_int64
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.memory.measured_rates import processor_name
from penstock.engine.models.errors import WrongProducts
from penstock.engine.models.layers.grouped import GroupedLinear
from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.native.compiler import cache_directory
from penstock.engine.native.packing import BAND, Packable, Packer, parts

logger = logging.getLogger(__name__)

# In the order of the bits in ways.h.
_WAYS = ("AMX tiles of bfloat16", "AMX tiles of bytes", "NEON with matrices of bfloat16")
_OF_CODES = 2  # which of them multiplies codes that are integers; the others do what is not
# A row alone comes first; the others make tiles of each size that codes have.
_NUM_ROWS = (1, 2, 3, 5, 8, 9, 13, 40)
_NUM_OUTPUTS = 40  # with a rest of a band
# Of a row of W and one of x, as long as they are: sums of float32 in another order.
_TOLERANCE = 1e-5
# So much of a layer stays in the nearest caches; a prompt has as many rows.
_TIMED_OUTPUTS, _TIMED_ROWS, _REPEATS = 256, 64, 9
_SPARE_ROWS = 32  # that products may write: kSpare of products.h
# So much is read to time prefetching, in copies of a part of a layer, as no cache holds it.
_STREAMED_BYTES, _MAX_COPIES, _STREAMED_REPEATS = 48 << 20, 64, 3
_FILE = "ways.json"


def try_products(library: ctypes.CDLL, layers: Sequence[Packable], dtype: torch.dtype) -> None:
    """Refuses the ways that are wrong or slow on this machine.

    layers: one of each format that the model has, which stay as they are. dtype: of plain weights.
    Raises WrongProducts where vectors are wrong, too.
    """
    library.penstock_ways.restype = c_int64
    library.penstock_try.restype = ctypes.c_double
    refused = 0
    _refuse(library, refused)
    samples = [_Sample(library, each, dtype, _NUM_OUTPUTS, is_compared=True) for each in layers]
    while wrong := next((sample for sample in samples if not sample.is_right()), None):
        if not (ways := library.penstock_ways()):
            raise WrongProducts(wrong.weight_format)
        refused |= ways & -ways
        _refuse(library, refused)
        logger.warning(
            "%s give wrong products on this processor, and are not used", _name(ways & -ways)
        )
    if library.penstock_ways():
        # A start that chose otherwise would round otherwise.
        slow = _kept(library, "", lambda: _slow_ways(library, layers, dtype))
        _refuse(library, refused | slow)
    formats = ", ".join(sorted({layer.weight_format for layer in layers}))
    does = _kept(library, f", {formats}", lambda: _gains_by_prefetching(library, layers, dtype))
    library.penstock_prefetch_for_few(c_int64(does))


def _kept(library: ctypes.CDLL, what: str, find: Callable[[], int]) -> int:
    """The first start on a machine finds it, by timing, and later ones read what it was."""
    key = f"{processor_name()}, {Path(library._name).name}{what}"
    kept: dict[str, int] = {}
    with suppress(OSError, ValueError, AttributeError):
        kept = dict(json.loads((cache_directory() / _FILE).read_text()).items())
    if key not in kept:
        kept[key] = find()
        with suppress(OSError):
            written = cache_directory() / f"{_FILE}.{os.getpid()}"
            written.write_text(json.dumps(kept))
            written.replace(cache_directory() / _FILE)
    return int(kept[key])


def _gains_by_prefetching(
    library: ctypes.CDLL, layers: Sequence[Packable], dtype: torch.dtype
) -> bool:
    """Whether a row alone, of weights in memory, is multiplied faster with prefetching."""
    seconds = [0.0, 0.0]
    for layer in layers:
        row_bytes = layer.num_bytes / layer.out_features
        num_outputs = min(layer.out_features, int(_STREAMED_BYTES / 4 / row_bytes))
        num = min(_MAX_COPIES, int(_STREAMED_BYTES / (num_outputs * row_bytes)))
        copies = [_Sample(library, layer, dtype, num_outputs) for _ in range(num)]
        best = [float("inf")] * 2
        for _ in range(_STREAMED_REPEATS):
            for does in (0, 1):
                library.penstock_prefetch_for_few(c_int64(does))
                best[does] = min(best[does], sum(each.seconds_alone() for each in copies))
        seconds = [total + one for total, one in zip(seconds, best, strict=True)]
    logger.info(
        "with prefetching a row is multiplied in %.2f of the time on this processor",
        seconds[1] / seconds[0],
    )
    return seconds[1] < seconds[0]


def _slow_ways(library: ctypes.CDLL, layers: Sequence[Packable], dtype: torch.dtype) -> int:
    """Those in which products take longer than by vectors."""
    return _timed(library, [_Sample(library, layer, dtype, _TIMED_OUTPUTS) for layer in layers])


def _timed(library: ctypes.CDLL, samples: "Sequence[_Sample]") -> int:
    slow, all_ways = 0, library.penstock_ways()
    for way in (1 << bit for bit in range(len(_WAYS)) if all_ways >> bit & 1):
        of_way = [sample for sample in samples if sample.has_codes == (way == _OF_CODES)]
        seconds = []
        for refused in (~all_ways | slow, ~all_ways | slow | way):
            _refuse(library, refused)
            seconds.append(sum(sample.seconds() for sample in of_way))
        if seconds[1] < seconds[0]:
            slow |= way
            logger.info(
                "%s take %.1f times as long as vectors on this processor, and are not used",
                _name(way),
                seconds[0] / seconds[1],
            )
    return slow


def _refuse(library: ctypes.CDLL, ways: int) -> None:
    library.penstock_refuse(c_int64(ways))


def _name(way: int) -> str:
    return _WAYS[way.bit_length() - 1]


class _Sample:
    """The first rows of a layer, packed in memory of their own."""

    def __init__(
        self,
        library: ctypes.CDLL,
        layer: Packable,
        dtype: torch.dtype,
        num_outputs: int,
        *,
        is_compared: bool = False,
    ) -> None:
        """is_compared: with torch, else it is only timed."""
        self.weight_format = layer.weight_format
        self.has_codes = isinstance(layer, GroupedLinear)
        part = layer.rows(0, min(num_outputs, layer.out_features))
        if isinstance(part, PlainLinear):
            part = PlainLinear(part.weight.clone(), None)  # else it is packed where it is
        elif isinstance(part, GroupedLinear):
            part = replace(part, bias=None, order=None)  # which only says where x is read
        else:
            part = replace(part, bias=None)
        self._library = library
        self._shape = part.out_features, part.in_features  # before it is packed
        self._weight: Tensor | None = None
        if is_compared:
            self._weight = torch.empty(self._shape)
            part.write_weight(self._weight)
        self._packer = Packer(library, dtype)
        [each] = parts(part, dtype)
        self._linear: Structure = self._packer.packed(each)

    def is_right(self) -> bool:
        """Whether all rows have torch's results, and the bits that they have alone."""
        weight = self._weight
        assert weight is not None, "it is only timed"
        x = _whole_numbers(max(_NUM_ROWS), weight.shape[1])
        expected = x.double() @ weight.double().T
        sizes = x.double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1)
        alone = torch.cat([self._product(row[None])[0] for row in x])
        if not bool(expected.isfinite().all()):
            return True  # the weights are to blame
        if not bool(((alone - expected).abs() <= _TOLERANCE * sizes).all()):
            return False
        return all(torch.equal(self._product(x[:num])[0], alone[:num]) for num in _NUM_ROWS)

    def seconds(self) -> float:
        x = _whole_numbers(_TIMED_ROWS, self._shape[1])
        return min(self._product(x)[1] for _ in range(_REPEATS))

    def seconds_alone(self) -> float:
        """Of one row, once."""
        return self._product(_whole_numbers(1, self._shape[1]))[1]

    def _product(self, x: Tensor) -> tuple[Tensor, float]:
        """Of x, (rows, in_features) in float32, and how long it took."""
        num_rows, num_outputs = len(x), self._shape[0]
        y = torch.empty(num_rows + _SPARE_ROWS, -(-num_outputs // BAND) * BAND)
        seconds = self._library.penstock_try(
            ctypes.byref(self._linear),
            ctypes.c_void_p(x.data_ptr()),
            c_int64(num_rows),
            ctypes.c_void_p(y.data_ptr()),
        )
        return y[:num_rows, :num_outputs], seconds


def _whole_numbers(rows: int, columns: int) -> Tensor:
    """Activations that rounding to bfloat16, or to 8 bits in groups, leaves as they are: the
    largest of each eight is 127. (rows, columns) float32."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-127, 128, (rows, columns), generator=generator).float()
    x[:, ::8] = 127
    return x
