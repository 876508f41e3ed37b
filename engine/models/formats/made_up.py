"""Made-up layers in a quantized format, for `--load-format dummy`."""

import torch
from torch import Tensor

from penstock.engine.models.formats.fp4.layer import LEVELS
from penstock.engine.models.formats.scheme import Awq, Fp4, Fp8, Gptq, Integers, Scheme
from penstock.engine.models.layers.fp8 import Fp8Linear
from penstock.engine.models.layers.grouped import GroupedLinear
from penstock.engine.models.layers.linear import StoredLinear

# The standard deviation of what random codes stand for, by their bits, and of E2M1's levels.
_OF_CODES = {4: 4.6, 8: 74.0}
_OF_LEVELS = 5.9


def made_up_layer(
    scheme: Scheme,
    shape: tuple[int, int],
    bias: Tensor | None,
    std: float,
    generator: torch.Generator,
) -> StoredLinear:
    """A layer of as many bytes as one that is read, on the generator's device. Its values have this
    standard deviation."""
    rows, columns = shape
    device = generator.device
    if isinstance(scheme, Fp8):
        height, width = scheme.block or (1, columns)
        codes = torch.randn(shape, generator=generator, device=device).to(torch.float8_e4m3fn)
        grid = (-(-rows // height), -(-columns // width))
        return Fp8Linear(codes, torch.full(grid, std, device=device), bias, block=(height, width))
    assert isinstance(scheme, Awq | Fp4 | Gptq | Integers), scheme
    bits = 8 if scheme.weight_format.startswith("int8") else 4
    group_size = scheme.group_size or columns
    groups = (rows, -(-columns // group_size))
    stored = (rows, -(-columns * bits // 8))
    codes = torch.randint(0, 256, stored, dtype=torch.uint8, generator=generator, device=device)
    is_fp4 = isinstance(scheme, Fp4)
    is_asymmetric = isinstance(scheme, Integers) and not scheme.is_symmetric
    middle, kind = (0, torch.int8) if bits == 8 else (8, torch.uint8)
    zeros = torch.full(groups, middle, dtype=kind, device=device)
    # As those that are read: e4m3 times a float32 fills a float32.
    is_wide = isinstance(scheme, Fp4) and scheme.global_scale is not None
    dtype = torch.float32 if is_wide else torch.float16
    scale = std / (_OF_LEVELS if is_fp4 else _OF_CODES[bits])
    return GroupedLinear(
        codes.view(torch.int8) if bits == 8 else codes,
        torch.full(groups, scale, dtype=dtype, device=device),
        bias,
        group_size=group_size,
        in_features=columns,
        zeros=zeros if isinstance(scheme, Awq) or is_asymmetric else None,
        levels=torch.tensor(LEVELS, dtype=torch.int8) if is_fp4 else None,
    )
