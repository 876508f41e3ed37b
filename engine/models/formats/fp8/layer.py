"""FP8: `weight` of e4m3, and its scales by one of two names."""

import torch
from torch import Tensor

from penstock.engine.models.formats.parts import Fp8Part
from penstock.engine.models.formats.scheme import Fp8
from penstock.engine.models.formats.tensors import LayerTensors

_NAN = 0x7F


def read_fp8(tensors: LayerTensors, scheme: Fp8) -> Fp8Part:
    codes = tensors.codes("weight", torch.float8_e4m3fn)
    if bool((codes[:1].view(torch.uint8) & _NAN == _NAN).any()):
        raise tensors.wrong("weight", "has numbers that are NaN; download the model again")
    rows, columns = codes.shape
    part = tensors.part("weight", codes.view(torch.uint8), (0, 1), (1, 1)).view(codes.dtype)
    # Despite its name, what is stored is to be multiplied by.
    name = "weight_scale_inv" if tensors.has("weight_scale_inv") else "weight_scale"
    if scheme.block is not None:
        height, width = scheme.block
        grid = (-(-rows // height), -(-columns // width))
        scales, block = tensors.blocks(tensors.scales(name, grid).float(), scheme.block)
        return Fp8Part(part, scales, block)
    scales = tensors.scales(name, (), (rows,), (rows, 1))
    by_row, width = tensors.groups(_by_row(scales, rows), columns)
    return Fp8Part(part, by_row, (1, width))


def _by_row(scales: Tensor, rows: int) -> Tensor:
    return scales.float().reshape(-1, 1).expand(rows, 1)
