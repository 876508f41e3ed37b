"""Integers of compressed-tensors: int8, or unsigned numbers packed into int32."""

import torch
from torch import Tensor

from penstock.engine.models.quantization.readers.bits import unpacked
from penstock.engine.models.quantization.readers.parts import GroupedPart
from penstock.engine.models.quantization.readers.tensors import LayerTensors
from penstock.engine.models.quantization.schemes import Integers


def read_integers(tensors: LayerTensors, scheme: Integers) -> GroupedPart:
    columns = tensors.in_features
    codes = (
        _packed_codes(tensors, scheme.bits)
        if scheme.is_packed
        else tensors.codes("weight", torch.int8)
    )
    rows = len(codes)
    group_size = scheme.group_size or columns
    groups = -(-columns // group_size)
    shapes = ((rows, groups),) if scheme.group_size else ((), (rows,), (rows, 1))
    scales = tensors.scales("weight_scale", *shapes).reshape(-1, groups)
    zeros = None if scheme.is_symmetric else _zeros(tensors, scheme, rows, groups)
    return GroupedPart(codes, scales.expand(rows, groups), group_size, columns, zeros=zeros)


def _packed_codes(tensors: LayerTensors, bits: int) -> Tensor:
    """Of `weight_packed`, whose first column is in the lowest bits, as codes of `GroupedLinear`."""
    if tensors.has("weight_g_idx"):
        raise tensors.wrong(
            "weight_g_idx",
            "orders columns by activation, which is not supported; quantize "
            "again with actorder 'static'",
        )
    packed = tensors.codes("weight_packed", torch.int32, 32 // bits).contiguous()
    columns = tensors.in_features
    if tensors.has("weight_shape"):
        shape = tensors.take("weight_shape", (torch.int64, torch.int32), 1)
        if shape.tolist() != [len(packed), columns]:
            raise tensors.wrong(
                "weight_shape", f"is {shape.tolist()}, not {[len(packed), columns]}"
            )
    if bits == 4:  # in memory, the bytes of the integers are those of `GroupedLinear`
        return packed.view(torch.uint8)[:, : -(-columns // 2)]
    return _signed(packed.view(torch.uint8)[:, :columns])


def _zeros(tensors: LayerTensors, scheme: Integers, rows: int, groups: int) -> Tensor:
    """Of 8 bits int8, of 4 bits uint8: (rows, groups)."""
    name = "weight_zero_point"
    is_whole = scheme.group_size is None
    tensor = tensors.take(name, (torch.int32, torch.int8), None)
    if tensor.dtype is torch.int8 and tensor.numel() in ((1, rows) if is_whole else ()):
        signed = tensor.reshape(-1, 1).expand(rows, 1)
        return signed if scheme.bits == 8 else (signed + 8).to(torch.uint8)
    if tensor.dtype is torch.int8:
        tensors.check(name, tensor, (rows, groups))
        return tensor if scheme.bits == 8 else (tensor + 8).to(torch.uint8)
    tensors.check(name, tensor, (-(-rows * scheme.bits // 32), groups))
    zeros = unpacked(tensor.t(), scheme.bits)[:, :rows].t()
    return zeros if scheme.bits == 4 else _signed(zeros)


def _signed(codes: Tensor) -> Tensor:
    """0 to 255 as -128 to 127."""
    return (codes.contiguous() ^ 128).view(torch.int8)
