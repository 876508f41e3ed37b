"""Keys and values in 8 bits: codes, and a scale for each token and head.

A head's vector x becomes round(x / scale), the scale being its largest magnitude over the largest
code: 127 for int8, 448 for float8_e4m3fn. Scales are float32: in float16 they would save 1.5 % of
the cache at head size 128, and vectors below 0.008 would lose bits to subnormals. One scale for
each token and head needs no calibration, and a token's codes depend on nothing but that token: not
on the batch, nor on how its prompt was divided into chunks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# The largest code.
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Vectors without a larger element become zeros: the inverse of their scale would be infinite.
LEAST_PEAK = 1e-30


@dataclass(frozen=True, slots=True)
class Codes:
    """One layer of the pool's keys, or values.

    codes: (num_blocks, block_size, num_kv_heads, head_dim), of a type in `LIMITS`. scales:
    (num_blocks, num_kv_heads, block_size) float32, so that those of successive tokens of a head,
    which are read together, are next to each other.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


# One layer of the pool's keys, or values: (num_blocks, block_size, num_kv_heads, head_dim).
KVPages = Tensor | Codes


def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of vectors (..., head_dim): like x, and (...) float32. A vector with a NaN
    or an infinity gets the scale NaN, so that it is found as in any type."""
    wide = x.float()
    peak = wide.abs().amax(-1)
    # Torch would compute a number over a tensor by its reciprocal, which rounds twice.
    inverse = torch.where(peak > LEAST_PEAK, torch.full_like(peak, LIMITS[dtype]) / peak, 0.0)
    scaled = wide * inverse.unsqueeze(-1)
    if dtype is torch.int8:
        scaled = scaled.round().nan_to_num(0.0)
    # 0, or NaN.
    not_finite = (wide * 0).sum(-1)
    return scaled.to(dtype), peak * (1 / LIMITS[dtype]) + not_finite


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `encode`, in float32."""
    return codes.float() * scales.unsqueeze(-1)


def store(pages: KVPages, kv_slots: Tensor, x: Tensor) -> None:
    """Writes a key or value (T, num_kv_heads, head_dim) to each of the kv_slots, (T,) int64."""
    if isinstance(pages, Tensor):
        pages.flatten(0, 1)[kv_slots] = x
        return
    codes, scales = encode(x, pages.codes.dtype)
    pages.codes.flatten(0, 1)[kv_slots] = codes
    block_size = pages.shape[1]
    pages.scales[kv_slots // block_size, :, kv_slots % block_size] = scales


def gather(pages: KVPages, tables: Tensor, dtype: torch.dtype) -> Tensor:
    """The blocks in these tables, (rows, blocks), as dtype: (rows, num_kv_heads, blocks *
    block_size, head_dim)."""
    if isinstance(pages, Tensor):
        gathered = pages[tables]
    else:
        scales = pages.scales[tables].transpose(2, 3)
        gathered = decode(pages.codes[tables], scales).to(dtype)
    return gathered.flatten(1, 2).transpose(1, 2)
