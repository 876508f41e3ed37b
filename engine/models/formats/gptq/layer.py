"""GPTQ: integers stored with the columns of the weight first."""

import torch

from penstock.engine.models.formats.gptq.config import Gptq
from penstock.engine.models.formats.tensors import LayerTensors, unpacked
from penstock.engine.models.layers.grouped import GroupedLinear, packed_nibbles


def read(tensors: LayerTensors, scheme: Gptq) -> GroupedLinear:
    columns, bits = tensors.in_features, scheme.bits
    group_size = scheme.group_size or columns
    groups = -(-columns // group_size)
    qweight = tensors.take("qweight", (torch.int32,))
    rows = qweight.shape[1]
    tensors.check("qweight", qweight, (-(-columns * bits // 32), rows))
    _check_zeros(tensors, scheme, groups, rows)
    _check_order(tensors, group_size)
    scales = tensors.scales("scales", (groups, rows))
    part = tensors.part("qweight", qweight, (1, 1), (0, 32 // bits))
    codes = unpacked(part.t(), bits)[:, : tensors.columns]
    stored = packed_nibbles(codes) if bits == 4 else (codes ^ 128).view(torch.int8)
    by_group, size = tensors.groups(scales.t(), group_size)
    return tensors.grouped(stored, by_group, size)


def _check_zeros(tensors: LayerTensors, scheme: Gptq, groups: int, rows: int) -> None:
    """Raises InvalidModel unless each is in the middle, as symmetric codes have it."""
    if not tensors.has("qzeros"):
        return
    qzeros = tensors.take("qzeros", (torch.int32,))
    tensors.check("qzeros", qzeros, (groups, -(-rows * scheme.bits // 32)))
    middle = 2 ** (scheme.bits - 1)
    zeros = unpacked(qzeros, scheme.bits)[:, :rows] + scheme.zero_offset
    if not bool((zeros == middle).all()):
        raise tensors.wrong(
            "qzeros",
            f"has zeros other than {middle}, so the layer is not symmetric as config.json says (or "
            "its checkpoint_format is another), which is not supported",
        )


def _check_order(tensors: LayerTensors, group_size: int) -> None:
    """Raises InvalidModel unless each column is in the group of its place."""
    if not tensors.has("g_idx"):
        return
    order = tensors.take("g_idx", (torch.int32, torch.int64), 1)
    tensors.check("g_idx", order, (tensors.in_features,))
    if not torch.equal(order.long(), torch.arange(tensors.in_features) // group_size):
        raise tensors.wrong(
            "g_idx",
            "orders columns by activation (desc_act), which is not supported; use a version of the "
            "model without desc_act",
        )
