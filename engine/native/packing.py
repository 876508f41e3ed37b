"""Packs linear layers for the compiled step, and fills the structures that it reads."""

import ctypes
import itertools
import logging
import math
from collections.abc import Sequence
from ctypes import Structure, c_bool, c_int64
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.memory.host import Arena, zeros_on_touch
from penstock.engine.models.errors import InvalidModel, UnsupportedWeightFormat
from penstock.engine.models.layers.coded import CodesLinear
from penstock.engine.models.layers.fp8 import Fp8Linear
from penstock.engine.models.layers.grouped import GroupedLinear, shortest
from penstock.engine.models.layers.linear import Linear, PlainLinear, StackedLinear
from penstock.engine.native.library import CODE_FORMATS, format_number
from penstock.engine.native.structures import structure

logger = logging.getLogger(__name__)

Packable = PlainLinear | GroupedLinear | Fp8Linear
PATH = "the compiled CPU step"
FORMATS = (PlainLinear.weight_format, *CODE_FORMATS, StackedLinear.weight_format)
"""The formats that `Packer` packs."""
BAND = 32
"""How many rows of a weight lie together: see products.h."""
# Activations are rounded in the same groups as weights, so that groups of more would cost
# precision.
_MAX_GROUP = 128
_GROUP_MULTIPLE = 8
_TABLE_BYTES = 64
# The exponents of bfloat16 have more than the codes': see fp8.h.
_FP8_SCALE = 256.0


class Packer:
    """Packs weights in bands of `BAND` rows, and owns what it gives the address of. dtype: of plain
    weights."""

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
        for layer in stored(linear):
            if isinstance(layer, CodesLinear):
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
            **self._weight(layer),
        )

    def _weight(self, layer: Packable) -> dict[str, Any]:
        """Packs the weight, and returns the fields of it. Raises InvalidModel."""
        match layer:
            case GroupedLinear():
                return self._grouped(layer)
            case Fp8Linear():
                return self._fp8(layer)
            case PlainLinear(weight=weight):
                packed = weight  # in its own memory if it fills its bands
                if len(weight) % BAND:
                    packed = zeros_on_touch((_whole(len(weight)), weight.shape[1]), weight.dtype)
                self._pack("", packed, weight, *weight.shape)
                layer.weight = packed
                return {"weight": self.address(packed)}

    def _fp8(self, layer: Fp8Linear) -> dict[str, Any]:
        """See fp8.h."""
        (rows, columns), (height, width) = layer.codes.shape, layer.block
        packed = self._codes("fp8", layer.codes.view(torch.uint8), columns, rows, columns)
        if packed is None:
            raise InvalidModel("weights in FP8 are NaN; download the model again")
        is_by_band = height % BAND == 0
        if is_by_band:
            by_band = layer.scales.repeat_interleave(height // BAND, dim=0)[: -(-rows // BAND)]
            scales = self.address((by_band * _FP8_SCALE).contiguous())
        else:
            scales = self._in_bands(layer.scales_by_row() * _FP8_SCALE)
        return {"weight": packed, "group": width, "scales": scales, "is_by_band": is_by_band}

    def _grouped(self, layer: GroupedLinear) -> dict[str, Any]:
        """See grouped.h and blocks.h."""
        groups = -(-layer.in_features // layer.group_size)
        row_bytes = groups * layer.group_size * layer.bits // 8
        sizes = (layer.out_features, layer.in_features, layer.bits)
        fields: dict[str, Any] = {"bits": layer.bits, "group": layer.group_size}
        fields["offset"] = 1 << (layer.bits - 1)
        if layer.levels is not None:
            fields["offset"] = offset = -int(layer.levels.min())
            levels = (layer.levels.short() + offset).to(torch.uint8)
            fields["table"] = self.address(levels.repeat(_TABLE_BYTES // len(levels)))
        if layer.has_blocks:
            high = 0 if layer.high is None else layer.high.data_ptr()
            fields["weight"] = self._codes("blocks", layer.codes, row_bytes, high, *sizes)
            fields["has_minima"] = layer.minima is not None
            fields["scales"] = self._in_bands(layer.scales, layer.minima)
            if layer.factors is not None:
                fields["factors"] = self._in_bands(layer.factors, layer.minimum_factors)
                fields["factor_columns"], fields["unit"] = layer.factor_columns, layer.unit
            return fields
        fields["order"] = self.address(layer.order)
        fields["weight"] = self._codes("codes", layer.codes, row_bytes, *sizes, layer.group_size)
        scales = shortest(layer.scales)
        fields["has_half_scales"] = scales.dtype is torch.float16
        fields["scales"] = self._in_bands(scales)
        if layer.zeros is not None:  # those of unsigned codes
            zeros = layer.zeros.view(torch.uint8) ^ (0x80 if layer.bits == 8 else 0)
            fields["zeros"] = self._in_bands(zeros)
        return fields

    def _codes(self, kind: str, codes: Tensor, row_bytes: int, *sizes: int) -> int | None:
        """Returns where the codes are, (rows, row_bytes) in bands, as `penstock_pack_KIND` packs
        them, which gets the sizes; None where they are not numbers."""
        packed = self._arena.empty((_whole(len(codes)), row_bytes), codes.dtype)
        return self.address(packed) if self._pack(f"_{kind}", packed, codes, *sizes) else None

    def _pack(self, kind: str, to: Tensor, codes: Tensor, *sizes: int) -> bool:
        """Calls a function of the library. Returns what that of FP8 does, and else True."""
        pack = getattr(self._library, f"penstock_pack{kind}")
        pack.restype = c_bool if kind == "_fp8" else None
        result = pack(*map(c_int64, (to.data_ptr(), codes.data_ptr(), *sizes)))
        return result is not False

    def _in_bands(self, *by_group: Tensor | None) -> int | None:
        """Returns where tensors of (rows, groups) are as (bands, groups, how many, 32), filled up
        with zeros."""
        stacked = torch.stack([each for each in by_group if each is not None], dim=2)
        padded = functional.pad(stacked, (0, 0, 0, 0, 0, -len(stacked) % BAND))
        banded = padded.view(-1, BAND, *stacked.shape[1:]).permute(0, 2, 3, 1)
        return self.address(banded.contiguous())


def _whole(rows: int) -> int:
    """Returns the rows of whole bands."""
    return -(-rows // BAND) * BAND


def stored(linear: Linear) -> list[Packable]:
    """Returns the layers that are stacked in this one. Raises UnsupportedWeightFormat."""
    if linear.weight_format not in FORMATS:
        raise UnsupportedWeightFormat(linear.weight_format, PATH, FORMATS)
    if isinstance(linear, StackedLinear):
        return [each for part in linear.parts for each in stored(part)]
    return [cast(Packable, linear)]


def parts(linear: Linear, dtype: torch.dtype, *rows: int) -> list[Packable]:
    """Returns the layers that are stacked in this one: in codes that are integers all, and in the
    same groups and order, or none, so that they read the same activations.

    dtype: of plain weights. rows: how many each of them has; one layer if there are none.
    """
    layers = stored(linear)
    if rows and len(layers) == 1:
        ends = itertools.accumulate(rows)
        layers = [layers[0].rows(end - num, end) for num, end in zip(rows, ends, strict=True)]
    grouped = [layer for layer in layers if isinstance(layer, GroupedLinear)]
    if not grouped:
        return [_widened(each, dtype) if _has_odd_scales(each) else each for each in layers]
    # Activations are rounded once for all of them.
    group = math.gcd(*map(_code_group, grouped))
    if len(grouped) < len(layers) or group % _GROUP_MULTIPLE or _differ_in_order(grouped):
        return [_widened(layer, dtype) for layer in layers]
    return [layer.regrouped(group) for layer in grouped]


def _differ_in_order(layers: Sequence[GroupedLinear]) -> bool:
    orders = {None if each.order is None else tuple(each.order.tolist()) for each in layers}
    if len(orders) > 1:
        logger.warning(
            "layers that read the same states order their columns differently (GPTQ's desc_act), "
            "so that %.3f GiB of codes become plain",
            sum(each.num_bytes for each in layers) / 2**30,
        )
    return len(orders) > 1


def _has_odd_scales(layer: Packable) -> bool:
    """Returns whether columns of one scale are not in pairs, as fp8.h needs them."""
    if not isinstance(layer, Fp8Linear):
        return False
    width, columns = layer.block[1], layer.in_features
    return columns % 2 == 1 or (width % 2 == 1 and width < columns)


def _code_group(layer: GroupedLinear) -> int:
    """Returns the largest groups that the codes can be split into, within the step's bounds."""
    if layer.has_blocks:
        return layer.group_size
    if layer.group_size >= layer.in_features:  # one scale a row
        return 64
    sizes = range(_GROUP_MULTIPLE, _MAX_GROUP + 1, _GROUP_MULTIPLE)
    return max((size for size in sizes if layer.group_size % size == 0), default=1)


def _widened(layer: Packable, dtype: torch.dtype) -> Packable:
    if isinstance(layer, PlainLinear):
        return layer
    weight = torch.empty((layer.out_features, layer.in_features), dtype=dtype)
    layer.write_weight(weight)
    return PlainLinear(weight, layer.bias)
