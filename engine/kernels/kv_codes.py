"""Codes of the KV cache in kernels: what `penstock.engine.memory.pool.kv_codes` computes in torch.

A kernel gets float8_e4m3fn as bytes (uint8), and converts them by integer arithmetic: GPUs before
compute capability 8.9 have no instruction for it, and numpy, which Triton's interpreter computes
with, no such type. Where the cache has no codes its scales are None, and these lines are not
compiled at all.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.memory.pool.kv_codes import LEAST_PEAK, LIMITS, KVPages

# Adding it to a float32 of less than 2^22 and subtracting it again rounds to the nearest integer,
# and to the even one of two.
_ROUND = tl.constexpr(12582912.0)
_LEAST_PEAK = tl.constexpr(LEAST_PEAK)
_INT8_LIMIT = tl.constexpr(LIMITS[torch.int8])
_FP8_LIMIT = tl.constexpr(LIMITS[torch.float8_e4m3fn])


def pointers(keys: KVPages, values: KVPages) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """A layer's keys and values, and the scales of both, as a kernel gets them."""
    if isinstance(keys, Tensor) or isinstance(values, Tensor):
        assert isinstance(keys, Tensor) and isinstance(values, Tensor), "both or neither has codes"
        return keys, values, None, None
    codes = (keys.codes, values.codes)
    if keys.codes.dtype is not torch.int8:
        codes = (keys.codes.view(torch.uint8), values.codes.view(torch.uint8))
    return *codes, keys.scales, values.scales


@triton.jit
def limit_of(kind: tl.constexpr):
    return _INT8_LIMIT if kind == tl.int8 else _FP8_LIMIT


@triton.jit
def inverse_scale(peak, kind: tl.constexpr):
    """peak: the largest magnitude of each vector."""
    is_tiny = peak <= _LEAST_PEAK
    return tl.where(is_tiny, 0.0, limit_of(kind) / tl.where(is_tiny, 1.0, peak))


@triton.jit
def scale_of(peak, not_finite, kind: tl.constexpr):
    """not_finite: 0, or NaN for a vector that has one or an infinity."""
    return peak * (1.0 / limit_of(kind)) + not_finite


@triton.jit
def encode(x, inverse, kind: tl.constexpr):
    """x: float32. inverse: see `inverse_scale`."""
    scaled = x * inverse
    if kind == tl.int8:
        codes = ((scaled + _ROUND) - _ROUND).to(tl.int8)
    else:
        magnitude = tl.abs(scaled)
        bits = magnitude.to(tl.int32, bitcast=True)
        # Its exponent and 3 of 23 bits of the fraction, rounded to even, with the other bias: 7 for
        # 127.
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 numbers are multiples of 2^-9.
        small = ((magnitude * 512.0 + _ROUND) - _ROUND).to(tl.int32)
        code = tl.where(magnitude < 0.015625, small, normal)
        codes = (code | ((scaled.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
    return codes


@triton.jit
def decode(codes, kind: tl.constexpr):
    """Codes as numbers of type kind, without their scale and divided by `unit_of`: exactly."""
    if codes.dtype == tl.int8:
        numbers = codes.to(kind)
    else:
        # A float16 with the same exponent and fraction has another bias, 15 for 7.
        wide = codes.to(tl.int8, bitcast=True).to(tl.int16)
        numbers = ((wide << 7) & -16385).to(tl.float16, bitcast=True).to(kind)
    return numbers


@triton.jit
def unit_of(kind: tl.constexpr):
    """kind: of the codes."""
    return 1.0 if kind == tl.int8 else 256.0


@triton.jit
def scale_offsets(slot, kv_head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where in the scales that of a token's head is. slot: the token's in the pool, int64."""
    block = slot // BLOCK_SIZE
    return (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
