"""FP8: `weight` of e4m3, and its scales by one of two names."""

import torch
from torch import Tensor

from penstock.engine.models.formats.fp8.config import Fp8
from penstock.engine.models.formats.tensors import LayerTensors
from penstock.engine.models.layers.fp8 import Fp8Linear

_NAN = 0x7F


def read(tensors: LayerTensors, scheme: Fp8) -> Fp8Linear:
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
        return Fp8Linear(part, scales, None, block=block)
    scales = tensors.scales(name, (), (rows,), (rows, 1))
    by_row = scales.float().reshape(-1, 1).expand(rows, 1)
    scales, width = tensors.groups(by_row, columns)
    return Fp8Linear(part, scales, None, block=(1, width))


def made_up(
    scheme: Fp8,
    shape: tuple[int, int],
    bias: Tensor | None,
    std: float,
    generator: torch.Generator,
) -> Fp8Linear:
    """See `TensorScheme.made_up`."""
    rows, columns = shape
    height, width = scheme.block or (1, columns)
    codes = torch.randn(shape, generator=generator, device=generator.device)
    grid = (-(-rows // height), -(-columns // width))
    scales = torch.full(grid, std, device=generator.device)
    return Fp8Linear(codes.to(torch.float8_e4m3fn), scales, bias, block=(height, width))
