"""Packs linear layers into the bands that products.h, grouped.h, blocks.h and fp8.h multiply."""

import ctypes
import itertools
import math
from collections.abc import Sequence
from ctypes import Structure, c_bool, c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.memory.host import Arena, zeros_on_touch
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.layers.fp8 import Fp8Linear
from penstock.engine.models.layers.grouped import GroupedLinear
from penstock.engine.models.layers.linear import Linear, LinearProducts, PlainLinear, StackedLinear
from penstock.engine.native.formats import CODE_FORMATS, format_number
from penstock.engine.native.structures import structure

PATH = "the compiled CPU step"
# products.h packs so many rows of a weight together.
BAND = 32
# Activations are rounded in the same groups as weights, so groups of more would cost precision.
_MAX_GROUP = 128
_GROUP_MULTIPLE = 8
_TABLE_BYTES = 64

# The exponents of bfloat16 have more than the codes': see fp8.h.
_FP8_SCALE = 256.0

_LINEAR = structure("Linear")

Packable = PlainLinear | GroupedLinear | Fp8Linear


class Packer:
    """Keeps all that it has given the address of. dtype: of plain weights."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._library = library
        self._arena = Arena()
        self._owned: list[object] = []

    def address(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        assert tensor.is_contiguous(), tensor.stride()
        self._owned.append(tensor)
        return tensor.data_ptr()

    def norm(self, weight: Tensor | None) -> int | None:
        return None if weight is None else self.address(weight.float())

    def norms(self, layer: object, *names: str) -> dict[str, int | None]:
        return {name: self.norm(getattr(layer, name)) for name in names}

    def array(self, kind: type[Structure], items: Sequence[Structure]) -> int:
        array = (kind * len(items))(*items)
        self._owned.append(array)
        return ctypes.addressof(array)

    def linear(self, linear: Linear) -> Structure:
        """Packs a layer that is not stacked; it cannot compute any more."""
        [packed] = self.linears(linear)
        return packed

    def linears(self, linear: Linear, *rows: int) -> list[Structure]:
        """Packs the layers that are stacked in this one: see `parts`."""
        packed = [self.packed(part) for part in parts(linear, self.dtype, *rows)]
        _release(linear)
        return packed

    def packed(self, layer: Packable) -> Structure:
        """Packs plain weights where they are, if they fill their bands."""
        if isinstance(layer, PlainLinear):
            return self._plain(layer)
        number = format_number(layer.weight_format)
        assert self._library.penstock_formats() >> number & 1, layer.weight_format
        return self._codes(layer) if isinstance(layer, GroupedLinear) else self._fp8(layer)

    def _pack(self, kind: str, to: int | None, codes: Tensor, *arguments: int | c_void_p) -> bool:
        """Calls a function of the library. Returns what that of FP8 does."""
        pack = getattr(self._library, f"penstock_pack{kind}")
        numbers = (c_int64(each) if isinstance(each, int) else each for each in arguments)
        return bool(pack(c_void_p(to), c_void_p(codes.data_ptr()), *numbers))

    def _plain(self, layer: PlainLinear) -> Structure:
        rows, columns = layer.weight.shape
        packed = layer.weight if rows % BAND == 0 else _bands(rows, columns, layer.weight.dtype)
        self._pack("", self.address(packed), layer.weight, rows, columns)
        layer.weight = packed
        return _LINEAR(
            weight=packed.data_ptr(), bias=self.address(layer.bias), rows=rows, columns=columns
        )

    def _fp8(self, layer: Fp8Linear) -> Structure:
        """See fp8.h. Raises InvalidModel."""
        rows, columns = layer.codes.shape
        height, width = layer.block
        packed = self._arena.empty((-(-rows // BAND) * BAND, columns), torch.uint8)
        self._library.penstock_pack_fp8.restype = c_bool
        if not self._pack("_fp8", self.address(packed), layer.codes, rows, columns):
            raise InvalidModel("weights in FP8 are NaN; download the model again")
        is_by_band = height % BAND == 0
        if is_by_band:
            scales = layer.scales.repeat_interleave(height // BAND, dim=0)[: len(packed) // BAND]
        else:
            scales = _in_bands(layer.scales_by_row())
        return _LINEAR(
            weight=packed.data_ptr(),
            bias=self.address(layer.bias),
            rows=rows,
            columns=columns,
            group=width,
            scales=self.address((scales * _FP8_SCALE).contiguous()),
            is_by_band=is_by_band,
            format=format_number(layer.weight_format),
        )

    def _codes(self, layer: GroupedLinear) -> Structure:
        rows, columns = layer.out_features, layer.in_features
        row_bytes = -(-columns // layer.group_size) * layer.group_size * layer.bits // 8
        packed = self._arena.empty((-(-rows // BAND) * BAND, row_bytes), layer.codes.dtype)
        native = _LINEAR(
            weight=self.address(packed),
            bias=self.address(layer.bias),
            rows=rows,
            columns=columns,
            bits=layer.bits,
            group=layer.group_size,
            offset=1 << (layer.bits - 1),
            format=format_number(layer.weight_format),
        )
        if layer.levels is not None:
            native.offset = -int(layer.levels.min())
            levels = (layer.levels.short() + native.offset).to(torch.uint8)
            native.table = self.address(levels.repeat(_TABLE_BYTES // len(levels)))
        if layer.has_blocks:
            self._add_blocks(layer, native)
        else:
            self._add_groups(layer, native)
        return native

    def _add_groups(self, layer: GroupedLinear, native: Structure) -> None:
        """See grouped.h."""
        sizes = (native.rows, native.columns, layer.bits, layer.group_size)
        self._pack("_codes", native.weight, layer.codes, *sizes)
        scales = layer.scales
        if scales.dtype is not torch.float16 and bool((scales.half().float() == scales).all()):
            scales = scales.half()
        native.has_half_scales = scales.dtype is torch.float16
        native.scales = self.address(_in_bands(scales))
        if layer.zeros is not None:
            # They are those of unsigned codes.
            zeros = layer.zeros.view(torch.uint8) ^ (0x80 if layer.bits == 8 else 0)
            native.zeros = self.address(_in_bands(zeros))

    def _add_blocks(self, layer: GroupedLinear, native: Structure) -> None:
        """See blocks.h."""
        high = c_void_p(None if layer.high is None else layer.high.data_ptr())
        sizes = (native.rows, native.columns, layer.bits)
        self._pack("_blocks", native.weight, layer.codes, high, *sizes)
        native.has_minima = layer.minima is not None
        native.scales = self.address(_in_bands(layer.scales, layer.minima))
        if layer.factors is not None:
            native.factors = self.address(_in_bands(layer.factors, layer.minimum_factors))


def check_format(linear: Linear) -> None:
    """Raises UnsupportedWeightFormat."""
    _LINEARS.of(linear)


def _release(linear: Linear) -> None:
    """Frees the codes of a layer that has been packed; it cannot compute any more."""
    for layer in _LINEARS.of(linear):
        if not isinstance(layer, PlainLinear):
            layer.codes, layer.scales = layer.codes.new_empty(0), layer.scales.new_empty(0)
        if isinstance(layer, GroupedLinear):
            layer.high = layer.minima = layer.factors = layer.minimum_factors = None


def parts(linear: Linear, dtype: torch.dtype, *rows: int) -> list[Packable]:
    """Returns the layers that are stacked in this one: in codes that are integers all, and in the
    same groups, or none, so that they read the same activations.

    dtype: of plain weights. rows: how many each of them has; one layer if there are none.
    """
    layers = _LINEARS.of(linear)
    if rows and len(layers) == 1:
        ends = itertools.accumulate(rows)
        layers = [layers[0].rows(end - num, end) for num, end in zip(rows, ends, strict=True)]
    if not any(isinstance(layer, GroupedLinear) for layer in layers):
        return [layer if _is_in_pairs(layer) else _widened(layer, dtype) for layer in layers]
    groups = [_group(layer) for layer in layers if isinstance(layer, GroupedLinear)]
    # Activations are rounded once for all of them.
    group = math.gcd(*groups)
    if len(groups) < len(layers) or group % _GROUP_MULTIPLE:
        return [_widened(layer, dtype) for layer in layers]
    return [layer.regrouped(group) for layer in layers if isinstance(layer, GroupedLinear)]


def _group(layer: GroupedLinear) -> int:
    """Returns the largest size that its groups can be split into, and that is not too large."""
    if layer.has_blocks:
        return layer.group_size
    if layer.group_size >= layer.in_features:  # one scale a row
        return 64
    sizes = range(_GROUP_MULTIPLE, _MAX_GROUP + 1, _GROUP_MULTIPLE)
    return max((size for size in sizes if layer.group_size % size == 0), default=1)


def _is_in_pairs(layer: Packable) -> bool:
    """Returns whether fp8.h has such groups; others are plain."""
    if not isinstance(layer, Fp8Linear):
        return True
    return layer.in_features % 2 == 0 and (
        layer.block[1] % 2 == 0 or layer.block[1] >= layer.in_features
    )


def _widened(layer: Packable, dtype: torch.dtype) -> PlainLinear:
    if isinstance(layer, PlainLinear):
        return layer
    weight = torch.empty((layer.out_features, layer.in_features), dtype=dtype)
    layer.write_weight(weight)
    return PlainLinear(weight, layer.bias)


def _bands(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return zeros_on_touch((-(-rows // BAND) * BAND, columns), dtype)


def _in_bands(*by_group: Tensor | None) -> Tensor:
    """Packs tensors of (rows, groups) into (bands, groups, how many, 32), filled up with zeros."""
    stacked = torch.stack([each for each in by_group if each is not None], dim=2)
    padded = functional.pad(stacked, (0, 0, 0, 0, 0, -len(stacked) % BAND))
    return padded.view(-1, BAND, *stacked.shape[1:]).permute(0, 2, 3, 1).contiguous()


def _as_is(linear: Packable) -> list[Packable]:
    return [linear]


def _each(stacked: StackedLinear) -> list[Packable]:
    return [part for linear in stacked.parts for part in _LINEARS.of(linear)]


_LINEARS: LinearProducts[list[Packable]] = LinearProducts(
    PATH,
    {
        PlainLinear.weight_format: _as_is,
        **dict.fromkeys(CODE_FORMATS, _as_is),
        StackedLinear.weight_format: _each,
    },
)

FORMATS = _LINEARS.formats
"""The formats that `Packer` packs."""
