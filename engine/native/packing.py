"""Packs linear layers for the compiled step, and fills the structures that it reads."""

import ctypes
import itertools
import math
from collections.abc import Sequence
from ctypes import Structure, c_bool, c_int64
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.memory.host import Arena, zeros_on_touch
from penstock.engine.models.errors import UnsupportedWeightFormat
from penstock.engine.models.layers.fp8 import Fp8Linear
from penstock.engine.models.layers.grouped import NATIVE_GROUP_MULTIPLE, GroupedLinear
from penstock.engine.models.layers.linear import BAND, Linear, PlainLinear, StackedLinear
from penstock.engine.native.library import CODE_FORMATS, format_number
from penstock.engine.native.structures import structure

Packable = PlainLinear | GroupedLinear | Fp8Linear
PATH = "the compiled CPU step"
FORMATS = (PlainLinear.weight_format, *CODE_FORMATS, StackedLinear.weight_format)
"""The formats that `Packer` packs."""


class Packer:
    """See `Bands`. dtype: of plain weights."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._library = library
        self._arena = Arena()
        self._owned: list[object] = []

    def filled(self, name: str, *sources: object, **given: Any) -> Structure:
        """Returns the structure of this name. A field that is not given is what the first source
        has that has such an attribute: a tensor in float32, a linear layer, those that are stacked
        in one, or a number. None stays zero, and so does all without a source, and a structure that
        none has. Raises AttributeError for any other field that none has."""
        packed = structure(name)(**given)
        known = [source for source in sources if source is not None]
        for field, *_ in packed._fields_:
            if field in given or not known:
                continue
            place = getattr(packed, field)
            source = next((each for each in known if hasattr(each, field)), None)
            if source is None and not isinstance(place, Structure):
                raise AttributeError(f"nothing is given for the field {field} of {name}")
            if (value := getattr(source, field, None)) is None:
                continue
            if isinstance(place, ctypes.Array):
                packed_parts = self.linears(cast(Linear, value))
                place[: len(packed_parts)] = packed_parts
            elif isinstance(place, Structure):
                setattr(packed, field, self.linear(cast(Linear, value)))
            else:
                setattr(packed, field, self.norm(value) if isinstance(value, Tensor) else value)
        return packed

    def address(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        assert tensor.is_contiguous(), tensor.stride()
        self._owned.append(tensor)
        return tensor.data_ptr()

    def norm(self, weight: Tensor | None) -> int | None:
        return None if weight is None else self.address(weight.float())

    def array(self, name: str, items: Sequence[Structure]) -> int:
        array = (structure(name) * len(items))(*items)
        self._owned.append(array)
        return ctypes.addressof(array)

    def linear(self, linear: Linear) -> Structure:
        """Packs a layer that is not stacked; it cannot compute any more."""
        [packed] = self.linears(linear)
        return packed

    def linears(self, linear: Linear, *rows: int) -> list[Structure]:
        """Packs the layers that are stacked in this one: see `parts`."""
        packed = [self.packed(part) for part in parts(linear, self.dtype, *rows)]
        for layer in _stored(linear):
            layer.release()
        return packed

    def packed(self, layer: Packable) -> Structure:
        number = format_number(layer.weight_format)
        assert not number or self._library.penstock_formats() >> number & 1, layer.weight_format
        return structure("Linear")(
            bias=self.address(layer.bias),
            rows=layer.out_features,
            columns=layer.in_features,
            format=number,
            **layer.packed(self),
        )

    def plain(self, weight: Tensor) -> Tensor:
        """See `Bands`."""
        packed = weight
        if len(weight) % BAND:
            packed = zeros_on_touch((_whole(len(weight)), weight.shape[1]), weight.dtype)
        self._pack("", packed, weight, *weight.shape)
        return packed

    def codes(self, kind: str, codes: Tensor, row_bytes: int, *sizes: int) -> int | None:
        """See `Bands`."""
        packed = self._arena.empty((_whole(len(codes)), row_bytes), codes.dtype)
        return self.address(packed) if self._pack(f"_{kind}", packed, codes, *sizes) else None

    def _pack(self, kind: str, to: Tensor, codes: Tensor, *sizes: int) -> bool:
        """Calls a function of the library. Returns what that of FP8 does, and else True."""
        pack = getattr(self._library, f"penstock_pack{kind}")
        pack.restype = c_bool if kind == "_fp8" else None
        result = pack(*map(c_int64, (to.data_ptr(), codes.data_ptr(), *sizes)))
        return result is not False

    def in_bands(self, *by_group: Tensor | None) -> int | None:
        """See `Bands`."""
        stacked = torch.stack([each for each in by_group if each is not None], dim=2)
        padded = functional.pad(stacked, (0, 0, 0, 0, 0, -len(stacked) % BAND))
        banded = padded.view(-1, BAND, *stacked.shape[1:]).permute(0, 2, 3, 1)
        return self.address(banded.contiguous())


def _whole(rows: int) -> int:
    """Returns the rows of whole bands."""
    return -(-rows // BAND) * BAND


def check_format(linear: Linear) -> None:
    """Raises UnsupportedWeightFormat."""
    _stored(linear)


def _stored(linear: Linear) -> list[Packable]:
    """Returns the layers that are stacked in this one. Raises UnsupportedWeightFormat."""
    if linear.weight_format not in FORMATS:
        raise UnsupportedWeightFormat(linear.weight_format, PATH, FORMATS)
    if isinstance(linear, StackedLinear):
        return [each for part in linear.parts for each in _stored(part)]
    return [cast(Packable, linear)]


def parts(linear: Linear, dtype: torch.dtype, *rows: int) -> list[Packable]:
    """Returns the layers that are stacked in this one: in codes that are integers all, and in the
    same groups, or none, so that they read the same activations.

    dtype: of plain weights. rows: how many each of them has; one layer if there are none.
    """
    layers = _stored(linear)
    if rows and len(layers) == 1:
        ends = itertools.accumulate(rows)
        layers = [layers[0].rows(end - num, end) for num, end in zip(rows, ends, strict=True)]
    groups = [layer.code_group for layer in layers if layer.code_group is not None]
    if not groups:
        return [each if each.has_packable_codes else _widened(each, dtype) for each in layers]
    # Activations are rounded once for all of them.
    group = math.gcd(*groups)
    if len(groups) < len(layers) or group % NATIVE_GROUP_MULTIPLE:
        return [_widened(layer, dtype) for layer in layers]
    return [layer.regrouped(group) for layer in layers]


def _widened(layer: Packable, dtype: torch.dtype) -> Packable:
    if isinstance(layer, PlainLinear):
        return layer
    weight = torch.empty((layer.out_features, layer.in_features), dtype=dtype)
    layer.write_weight(weight)
    return PlainLinear(weight, layer.bias)
