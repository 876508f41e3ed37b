"""E2M1: MXFP4 and NVFP4."""

import torch

from penstock.engine.models.formats.fp4.config import Fp4
from penstock.engine.models.formats.tensors import LayerTensors
from penstock.engine.models.layers.grouped import GroupedLinear

_POWERS = (torch.uint8, torch.float8_e8m0fnu)


def read(tensors: LayerTensors, scheme: Fp4) -> GroupedLinear:
    columns = tensors.in_features
    codes = tensors.codes(scheme.weight, torch.uint8, 2)
    shape = (len(codes), -(-columns // scheme.group_size))
    if scheme.global_scale is None:
        scales = tensors.scales(scheme.scale, shape, dtypes=_POWERS)
    else:
        scales = tensors.scales(scheme.scale, shape, dtypes=(torch.float8_e4m3fn,))
        global_scale = tensors.scales(scheme.global_scale, ()).float().reshape(())
        scales = scales / global_scale if scheme.divides else scales * global_scale
        tensors.check_finite(scheme.global_scale, scales)
    part = tensors.part(scheme.weight, codes, (0, 1), (1, 2))
    by_group, size = tensors.groups(scales / 2, scheme.group_size)
    levels = torch.tensor(scheme.levels, dtype=torch.int8)
    return tensors.grouped(part, by_group, size, levels=levels)
