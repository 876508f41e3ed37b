"""The device and types that kernels are tested with, and the tolerances."""

import torch
from torch import Tensor

from penstock.engine.kernels.linear import Scaled
from penstock.engine.memory.pool.kv_codes import Codes, encode

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# Triton's interpreter multiplies bfloat16 matrices wrongly (3.6 to 3.9), so only GPUs test it.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
# Of ||out - ref|| / ||ref||, the reference being computed in float32.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
# Of a logprob. Near -10 float32 has steps of 1e-6, and thousands of exponentials are summed in an
# order of the processor's own; a temperature or a penalty applied by mistake changes it by 0.1.
LOGPROB_TOLERANCE = 1e-4


def error(out: Tensor, reference: Tensor) -> float:
    """Relative, by norms; not finite if `out` is not."""
    difference = out.double() - reference.double()
    return float(difference.norm() / reference.double().norm())


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """NaNs, so that every element that is not written shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def scaled(x: Tensor, norm: Tensor, num_parts: int = 3) -> Scaled:
    """As the product before leaves it."""
    parts = x.float().square().tensor_split(num_parts, 1)
    squares = torch.stack([part.sum(1) for part in parts], 1)
    return Scaled((x.float() * norm.float()).to(x.dtype), squares)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def coded(pages: Tensor, dtype: torch.dtype) -> Codes:
    """A layer's keys or values in 8 bits."""
    codes, scales = encode(pages, dtype)
    return Codes(codes, scales.transpose(1, 2).contiguous())
