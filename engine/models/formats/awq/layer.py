"""AWQ: integers stored with the columns of the weight first."""

import torch
from torch import Tensor

from penstock.engine.models.formats.awq.config import Awq
from penstock.engine.models.formats.tensors import LayerTensors, unpacked
from penstock.engine.models.layers.grouped import GroupedLinear, packed_nibbles

# Where AWQ puts each of eight columns, from the lowest bits: 0, 2, 4, 6, 1, 3, 5, 7 in reverse.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def read(tensors: LayerTensors, scheme: Awq) -> GroupedLinear:
    columns = tensors.in_features
    group_size = scheme.group_size or columns
    groups = -(-columns // group_size)
    qweight = tensors.take("qweight", (torch.int32,))
    tensors.check("qweight", qweight, (columns, qweight.shape[1]))
    rows = 8 * qweight.shape[1]
    qzeros = tensors.take("qzeros", (torch.int32,))
    tensors.check("qzeros", qzeros, (groups, qweight.shape[1]))
    scales = tensors.scales("scales", (groups, rows))
    part = tensors.part("qweight", qweight, (1, 8), (0, 1))
    codes = packed_nibbles(_in_order(part).t())
    by_group, size = tensors.groups(scales.t(), group_size)
    zeros, _ = tensors.groups(_in_order(qzeros).t(), group_size)
    return tensors.grouped(codes, by_group, size, zeros=zeros)


def _in_order(packed: Tensor) -> Tensor:
    numbers = unpacked(packed, 4)
    return numbers.view(len(numbers), -1, 8)[..., _AWQ_ORDER].flatten(1)
