"""E2M1: MXFP4 and NVFP4."""

import torch

from penstock.engine.models.formats.parts import GroupedPart
from penstock.engine.models.formats.scheme import Fp4
from penstock.engine.models.formats.tensors import LayerTensors

# Twice the numbers that the codes stand for, so that they are integers; bit 3 is the sign.
_TWICE = (0, 1, 2, 3, 4, 6, 8, 12)
LEVELS = (*_TWICE, *(-level for level in _TWICE))
_POWERS = (torch.uint8, torch.float8_e8m0fnu)


def read_fp4(tensors: LayerTensors, scheme: Fp4) -> GroupedPart:
    columns = tensors.in_features
    codes = tensors.codes(scheme.weight, torch.uint8, 2)
    shape = (len(codes), -(-columns // scheme.group_size))
    if scheme.global_scale is None:
        scales = tensors.scales(scheme.scale, shape, dtypes=_POWERS)
    else:
        scales = tensors.scales(scheme.scale, shape, dtypes=(torch.float8_e4m3fn,))
        of_all = tensors.scales(scheme.global_scale, ()).float().reshape(())
        scales = scales / of_all if scheme.divides else scales * of_all
        tensors.check_finite(scheme.global_scale, scales)
    part = tensors.part(scheme.weight, codes, (0, 1), (1, 2))
    of_groups, size = tensors.groups(scales / 2, scheme.group_size)
    levels = torch.tensor(LEVELS, dtype=torch.int8)
    return GroupedPart(part, of_groups, size, tensors.columns, levels=levels)
