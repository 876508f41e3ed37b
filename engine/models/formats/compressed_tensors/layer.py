"""Integers of compressed-tensors: int8, or unsigned numbers packed into int32."""

import torch
from torch import Tensor

from penstock.engine.models.formats.compressed_tensors.config import Integers
from penstock.engine.models.formats.tensors import LayerTensors, signed, unpacked
from penstock.engine.models.layers.grouped import GroupedLinear


def read(tensors: LayerTensors, scheme: Integers) -> GroupedLinear:
    rows, codes = _packed_codes(tensors, scheme.bits) if scheme.is_packed else _codes(tensors)
    columns = tensors.in_features
    whole_size = scheme.group_size or columns
    groups = -(-columns // whole_size)
    shapes = ((rows, groups),) if scheme.group_size else ((), (rows,), (rows, 1))
    stored = tensors.scales("weight_scale", *shapes).reshape(-1, groups).expand(rows, groups)
    scales, group_size = tensors.groups(stored, whole_size)
    zeros = None
    if scheme.has_zeros:
        zeros, _ = tensors.groups(_zeros(tensors, scheme, rows, groups), whole_size)
    return tensors.grouped(codes, scales, group_size, zeros=zeros)


def _codes(tensors: LayerTensors) -> tuple[int, Tensor]:
    """Returns the rows of the whole, and the codes of the part that is to be read."""
    codes = tensors.codes("weight", torch.int8)
    return len(codes), tensors.part("weight", codes, (0, 1), (1, 1))


def _packed_codes(tensors: LayerTensors, bits: int) -> tuple[int, Tensor]:
    """The same of `weight_packed`, whose first column is in the lowest bits, as codes of
    `GroupedLinear`."""
    if tensors.has("weight_g_idx"):
        raise tensors.wrong(
            "weight_g_idx",
            "orders columns by activation, which is not supported; quantize "
            "again with actorder 'static'",
        )
    packed = tensors.codes("weight_packed", torch.int32, 32 // bits)
    columns = tensors.in_features
    if tensors.has("weight_shape"):
        shape = tensors.take("weight_shape", (torch.int64, torch.int32), 1)
        if shape.tolist() != [len(packed), columns]:
            raise tensors.wrong(
                "weight_shape", f"is {shape.tolist()}, not {[len(packed), columns]}"
            )
    rows = len(packed)
    packed = tensors.part("weight_packed", packed, (0, 1), (1, 32 // bits)).contiguous()
    in_bytes = packed.view(torch.uint8)
    if bits == 4:  # in memory, the bytes of the integers are those of `GroupedLinear`
        return rows, in_bytes[:, : -(-tensors.columns // 2)]
    return rows, signed(in_bytes[:, : tensors.columns])


def _zeros(tensors: LayerTensors, scheme: Integers, rows: int, groups: int) -> Tensor:
    """Returns (rows, groups): int8 for 8 bits, uint8 for 4."""
    name = "weight_zero_point"
    is_whole = scheme.group_size is None
    tensor = tensors.take(name, (torch.int32, torch.int8), None)
    if tensor.dtype is torch.int8 and tensor.numel() in ((1, rows) if is_whole else ()):
        by_row = tensor.reshape(-1, 1).expand(rows, 1)
        return by_row if scheme.bits == 8 else (by_row + 8).to(torch.uint8)
    if tensor.dtype is torch.int8:
        tensors.check(name, tensor, (rows, groups))
        return tensor if scheme.bits == 8 else (tensor + 8).to(torch.uint8)
    tensors.check(name, tensor, (-(-rows * scheme.bits // 32), groups))
    zeros = unpacked(tensor.t(), scheme.bits)[:, :rows].t()
    return zeros if scheme.bits == 4 else signed(zeros)
