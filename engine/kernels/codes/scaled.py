"""Linear layers of FP8 with a scale for each row of the weight, for more than a few rows of x.

Each row of x is rounded to float8_e4m3fn too, with a scale of its own, and both go to the matrix
units as they are: these multiply twice as fast as in bfloat16, and nothing is widened. vLLM, SGLang
and TensorRT-LLM compute such weights so. Source of the type: Micikevicius et al. 2022, FP8 Formats
for Deep Learning (arXiv:2209.05433).
"""

import logging
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.codes.weight import CodedWeight
from penstock.engine.kernels.kv_codes import encode, inverse_scale, scale_of
from penstock.engine.kernels.launch import overlapped, wait_for_kernels_before
from penstock.engine.kernels.sizes import next_power_of_2

# Rows of both sides of torch's product begin at 16 bytes, and its sums become bfloat16.
_ALIGNED = 16

logger = logging.getLogger(__name__)


def takes(weight: CodedWeight, dtype: torch.dtype) -> bool:
    """Whether `scaled_linear` computes it; dtype: of x."""
    is_fp8 = weight.bits == 8 and weight.codes.dtype is torch.uint8  # so are codes of 4 bits
    has_scale_by_row = is_fp8 and len(weight.scales) == 1
    is_aligned = not (weight.codes.shape[0] % _ALIGNED or weight.codes.shape[1] % _ALIGNED)
    if not (has_scale_by_row and is_aligned and dtype is torch.bfloat16):
        return False
    return weight.codes.device.type == "meta" or _multiplies(weight.codes.device)


@cache
def _multiplies(device: torch.device) -> bool:
    """Ada, Hopper and later do, if torch was built with their kernels."""
    codes = torch.zeros(_ALIGNED, _ALIGNED, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.ones(_ALIGNED, 1, device=device)
    try:
        torch._scaled_mm(codes, codes.t(), scales, scales.t(), out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError) as error:
        logger.warning(
            "weights in FP8 are widened for products, which is slower, as torch does not multiply "
            "FP8 on this device (%s)",
            error,
        )
        return False
    return True


def scaled_linear(x: Tensor, weight: CodedWeight, bias: Tensor | None = None) -> Tensor:
    """(T, outputs): x W^T + bias, where `takes` says so. x: (T, columns)."""
    assert x.shape[1] == weight.columns, (x.shape, weight.columns)
    codes, scales = _rounded(x, weight.codes.shape[1])
    return torch._scaled_mm(
        codes.view(torch.float8_e4m3fn),
        weight.codes.view(torch.float8_e4m3fn).t(),
        scales,
        weight.scales,
        bias,
        out_dtype=x.dtype,
        # Sums of some columns in the units' own 14 bits, as peers do: a quarter faster.
        use_fast_accum=True,
    )


def _rounded(x: Tensor, row_bytes: int) -> tuple[Tensor, Tensor]:
    """Codes (T, row_bytes) uint8, 0 beyond the columns of x, and scales (T, 1) float32."""
    rows, columns = x.shape
    codes = torch.empty(rows, row_bytes, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    _round_rows[(rows,)](
        x, codes, scales, x.stride(0), columns, row_bytes,
        SIZE=next_power_of_2(row_bytes), num_warps=4 if row_bytes <= 4096 else 8, **overlapped(),
    )  # fmt: skip
    return codes, scales


@triton.jit
def _round_rows(
    x, codes, scales, x_stride, columns, row_bytes, SIZE: tl.constexpr, PDL: tl.constexpr
):
    """One row. One that is not finite gets a scale that is not, so that NaN reaches the logits."""
    wait_for_kernels_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    numbers = tl.load(x + row * x_stride + column, mask=column < columns, other=0.0).to(tl.float32)
    is_finite = tl.abs(numbers) < float("inf")
    not_finite = tl.sum(tl.where(is_finite, 0.0, float("nan")), axis=0)
    numbers = tl.where(is_finite, numbers, 0.0)
    peak = tl.max(tl.abs(numbers), axis=0)
    rounded = encode(numbers, inverse_scale(peak, tl.uint8), tl.uint8)
    tl.store(codes + row * row_bytes + column, rounded, mask=column < row_bytes)
    tl.store(scales + row, scale_of(peak, not_finite, tl.uint8))
