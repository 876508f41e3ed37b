"""GPTQ: integers stored with the columns of the weight first."""

from dataclasses import replace

import torch
from torch import Tensor

from penstock.engine.models.formats.gptq.config import Gptq
from penstock.engine.models.formats.tensors import LayerTensors, made_up_grouped, signed, unpacked
from penstock.engine.models.layers.grouped import GroupedLinear, packed_nibbles


def read(tensors: LayerTensors, scheme: Gptq) -> GroupedLinear:
    columns, bits = tensors.in_features, scheme.bits
    size = scheme.group_size or columns
    groups = -(-columns // size)
    qweight = tensors.take("qweight", (torch.int32,))
    rows = qweight.shape[1]
    tensors.check("qweight", qweight, (-(-columns * bits // 32), rows))
    zeros = _zeros(tensors, scheme, groups, rows)
    scales = tensors.scales("scales", (groups, rows)).t()
    part = tensors.part("qweight", qweight, (1, 1), (0, 32 // bits))
    codes = unpacked(part.t(), bits)[:, : tensors.columns]
    order, group_of = None, _groups_of_columns(tensors, size)
    if group_of is not None and (scheme.is_by_column or tensors.columns < columns):
        size, scales = 1, scales[:, group_of]
        zeros = None if zeros is None else zeros[:, group_of]
    elif group_of is not None:
        order = group_of.argsort(stable=True).int()
        codes = codes[:, order]
    by_group, part_size = tensors.groups(scales, size)
    if zeros is not None:
        zeros, _ = tensors.groups(zeros, size)
        zeros = zeros if bits == 4 else signed(zeros)
    stored = packed_nibbles(codes) if bits == 4 else signed(codes)
    return tensors.grouped(stored, by_group, part_size, zeros=zeros, order=order)


def made_up(
    scheme: Gptq,
    shape: tuple[int, int],
    bias: Tensor | None,
    std: float,
    generator: torch.Generator,
) -> GroupedLinear:
    """See `TensorScheme.made_up`."""
    if scheme.is_by_column:
        scheme = replace(scheme, group_size=1)
    layer = made_up_grouped(scheme, shape, bias, std, generator)
    if not scheme.is_ordered or scheme.is_by_column:
        return layer
    return replace(layer, order=torch.randperm(shape[1], generator=generator).int())


def _zeros(tensors: LayerTensors, scheme: Gptq, groups: int, rows: int) -> Tensor | None:
    """Returns (rows, groups) uint8; None for symmetric codes, whose zeros are in the middle. Raises
    InvalidModel where they are not."""
    if not scheme.has_zeros and not tensors.has("qzeros"):
        return None
    qzeros = tensors.take("qzeros", (torch.int32,))
    tensors.check("qzeros", qzeros, (groups, -(-rows * scheme.bits // 32)))
    if scheme.has_zeros:
        # They are one less as integers of 32 bits: 0 borrows from its neighbour.
        ones = scheme.zero_offset * (0xFFFFFFFF // (2**scheme.bits - 1))
        return unpacked(qzeros + ones, scheme.bits)[:, :rows].t()
    middle = 2 ** (scheme.bits - 1)
    stored = unpacked(qzeros, scheme.bits)[:, :rows]
    # Some files that say version 1 have the zeros of version 2.
    if not any(bool((stored == each).all()) for each in (middle - 1, middle)):
        raise tensors.wrong(
            "qzeros",
            f"has zeros other than {middle}, so the layer is not symmetric as config.json says; "
            'set "sym" to false there if the model was quantized so',
        )
    return None


def _groups_of_columns(tensors: LayerTensors, size: int) -> Tensor | None:
    """Returns (in_features,) int64; None where each column is in the group of its place. Raises
    InvalidModel unless groups have so many columns, but for the last."""
    if not tensors.has("g_idx"):
        return None
    group_of = tensors.take("g_idx", (torch.int32, torch.int64), 1).long()
    tensors.check("g_idx", group_of, (tensors.in_features,))
    in_place = torch.arange(tensors.in_features) // size
    if not torch.equal(group_of.sort().values, in_place):
        raise tensors.wrong("g_idx", f"has groups of other sizes than the {size} of config.json")
    return None if torch.equal(group_of, in_place) else group_of
