"""Made-up layers of codes in groups, for `--load-format dummy`."""

import torch
from torch import Tensor

from penstock.engine.models.formats.scheme import GroupedScheme
from penstock.engine.models.layers.grouped import GroupedLinear

# The standard deviation of what random codes stand for, by their bits, and of E2M1's levels.
_STD_OF_CODES = {4: 4.6, 8: 74.0}
_STD_OF_LEVELS = 5.9


def made_up_grouped(
    scheme: GroupedScheme,
    shape: tuple[int, int],
    bias: Tensor | None,
    std: float,
    generator: torch.Generator,
) -> GroupedLinear:
    """See `TensorScheme.made_up`."""
    rows, columns = shape
    bits, levels, device = scheme.bits, scheme.levels, generator.device
    group_size = scheme.group_size or columns
    groups = (rows, -(-columns // group_size))
    stored = (rows, -(-columns * bits // 8))
    codes = torch.randint(0, 256, stored, dtype=torch.uint8, generator=generator, device=device)
    middle, kind = (0, torch.int8) if bits == 8 else (8, torch.uint8)
    dtype = torch.float32 if scheme.has_wide_scales else torch.float16
    scale = std / (_STD_OF_LEVELS if levels else _STD_OF_CODES[bits])
    return GroupedLinear(
        codes.view(kind),
        torch.full(groups, scale, dtype=dtype, device=device),
        bias,
        group_size=group_size,
        in_features=columns,
        zeros=torch.full(groups, middle, dtype=kind, device=device) if scheme.has_zeros else None,
        levels=torch.tensor(levels, dtype=torch.int8) if levels else None,
    )
