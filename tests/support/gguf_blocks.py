"""Numbers as the blocks of GGUF: by llama.cpp's package, and what that only reads, by simple
rounding, which is worse than llama.cpp's, or as blocks at random."""

import zlib
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

# numpy's types are wider than what is computed with uint8 and float32.
Floats = NDArray[Any]
Bytes = NDArray[Any]
_LEVELS = np.array(gguf.quants.IQ4_NL.kvalues, np.float32)


def quantized_blocks(values: Floats, kind: Type) -> Bytes:
    """(..., columns) to (..., bytes of a row)."""
    size = gguf.GGML_QUANT_SIZES[kind][0]
    if kind in _FACTORS or kind is Type.IQ1_M:
        blocks = _at_random(values, kind)
    elif kind in _ENCODERS:
        blocks = _ENCODERS[kind](values.reshape(-1, size).astype(np.float32))
    else:
        packed: Bytes = gguf.quants.quantize(values, kind)
        return packed
    return np.ascontiguousarray(blocks.reshape(*values.shape[:-1], -1))


def dequantized_blocks(packed: Bytes, kind: Type | int) -> Floats:
    """(..., bytes of a row) to (..., columns). kind: or the number of one that the package does not
    know."""
    if kind in (Type.Q1_0, 42):
        bits = 1 if kind == Type.Q1_0 else 2
        blocks = packed.reshape(-1, 18)
        scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = (blocks[:, 2:, None] >> shifts & (1 << bits) - 1).reshape(len(blocks), -1)
        numbers = 2.0 * codes - 1 if bits == 1 else codes - 1.0
        return (scales * numbers.astype(np.float32)).reshape(*packed.shape[:-1], -1)
    numbers_of_package: Floats = gguf.quants.dequantize(packed, Type(kind))
    return numbers_of_package


# Where the factors of a block are: of types that only the C of llama.cpp writes.
_FACTORS = {
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    **dict.fromkeys((Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S), (0,)),
    **dict.fromkeys((Type.IQ3_XXS, Type.IQ3_S, Type.IQ1_S), (0,)),
}


def _at_random(values: Floats, kind: Type) -> Bytes:
    """Blocks of any bytes, the same for the same values, whose numbers are about as large."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(zlib.crc32(np.ascontiguousarray(values).tobytes()))
    blocks = random.integers(0, 256, (values.size // size, num_bytes), dtype=np.uint8)
    _set_factor(blocks, kind, np.float16(1))
    found = gguf.quants.dequantize(blocks, kind)
    _set_factor(blocks, kind, np.float16(values.std() / found.std()))
    return blocks


def _set_factor(blocks: Bytes, kind: Type, factor: np.float16) -> None:
    for at in _FACTORS.get(kind, ()):
        blocks[:, at : at + 2] = np.array([factor]).view(np.uint8)
    if kind is Type.IQ1_M:  # in the highest four bits of four words
        bits = int(np.array([factor]).view(np.uint16)[0])
        for index in range(4):
            last = blocks[:, 49 + 2 * index]
            last[:] = last & 15 | (bits >> 4 * index & 15) << 4


def _signs(blocks: Floats) -> Bytes:
    scales = np.abs(blocks).mean(1, keepdims=True).astype(np.float16).view(np.uint8)
    return np.concatenate([scales, np.packbits(blocks > 0, axis=1, bitorder="little")], axis=1)


def _nvfp4(values: Floats) -> Bytes:
    groups, kind = values.reshape(-1, 4, 16), gguf.quants.NVFP4
    scales = kind.fp32_to_ue4m3(np.abs(groups).max(2) / 6)
    step = kind.ue4m3_to_fp32(scales)[..., None, None]
    levels = np.array(kind.kvalues, np.float32)
    codes = np.abs(groups[..., None] / np.where(step == 0, 1, step) - levels).argmin(-1)
    packed = _nibbles(*np.split(codes.astype(np.uint8), 2, axis=2)).reshape(-1, 32)
    return np.concatenate([scales, packed], axis=1)


def _codes(values: Floats, highest: int) -> Bytes:
    return np.clip(np.round(values), 0, highest).astype(np.uint8)


def _factor(numbers: Floats, most: int) -> tuple[Bytes, Floats]:
    """Positive numbers of blocks as codes up to `most`, and the factor, as bytes and as floats."""
    half: Floats = (numbers.max(1, keepdims=True) / most).astype(np.float16)
    half[half == 0] = 1
    return half.view(np.uint8), half.astype(np.float32)


def _nibbles(low: Bytes, high: Bytes) -> Bytes:
    packed: Bytes = low | high << 4
    return packed


def _with_minima(values: Floats, bits: int) -> Bytes:
    groups = values.reshape(-1, 8, 32)
    least = -np.minimum(groups.min(2), 0)
    scales = (groups.max(2) + least) / (2**bits - 1)
    (d_bytes, d), (m_bytes, m) = _factor(scales, 63), _factor(least, 63)
    scales, minima = _codes(scales / d, 63), _codes(least / m, 63)
    step = np.where(scales == 0, 1, scales * d)[..., None]
    codes = _codes((groups + (minima * m)[..., None]) / step, 2**bits - 1)
    packed = [
        d_bytes,
        m_bytes,
        scales[:, :4] | scales[:, 4:] >> 4 << 6,
        minima[:, :4] | minima[:, 4:] >> 4 << 6,
        _nibbles(scales[:, 4:] & 15, minima[:, 4:] & 15),
    ]
    if bits == 5:
        group = np.arange(8, dtype=np.uint8)[:, None]
        packed.append(np.bitwise_or.reduce(codes >> 4 << group, axis=1))
    low = codes & 15
    packed.append(_nibbles(low[:, ::2], low[:, 1::2]).reshape(-1, 128))
    return np.concatenate(packed, axis=1)


def _q6_k(values: Floats) -> Bytes:
    groups = values.reshape(-1, 16, 16)
    d_bytes, d = _factor(np.abs(groups).max(2) / 31, 127)
    scales = _codes(np.abs(groups).max(2) / 31 / d, 127)
    scales[:, ::3] *= np.uint8(255)  # some are negative
    step = (scales.view(np.int8) * d)[..., None]
    codes = _codes(groups / np.where(step == 0, 1, step) + 32, 63).reshape(-1, 2, 4, 32)
    low = _nibbles(codes[:, :, :2] & 15, codes[:, :, 2:] & 15).reshape(-1, 128)
    pair = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce(codes >> 4 << pair, axis=2).reshape(-1, 64)
    return np.concatenate([low, high, scales, d_bytes], axis=1)


def _iq4_xs(values: Floats) -> Bytes:
    groups = values.reshape(-1, 8, 32)
    largest = np.abs(groups).max(2) / 113
    d_bytes, d = _factor(largest, 31)
    scales = _codes(largest / d, 31) + 32
    step = ((scales.astype(np.float32) - 32) * d)[..., None, None]
    distance = np.abs(groups[..., None] / np.where(step == 0, 1, step) - _LEVELS)
    codes = distance.argmin(-1).astype(np.uint8)
    pair = np.arange(0, 8, 2, dtype=np.uint8)
    upper = np.bitwise_or.reduce((scales >> 4).reshape(-1, 2, 4) << pair, axis=2)
    lower = _nibbles(scales[:, ::2] & 15, scales[:, 1::2] & 15)
    packed = _nibbles(codes[..., :16], codes[..., 16:]).reshape(-1, 128)
    return np.concatenate([d_bytes, upper, lower, packed], axis=1)


_ENCODERS = {
    Type.Q4_K: lambda values: _with_minima(values, 4),
    Type.Q5_K: lambda values: _with_minima(values, 5),
    Type.Q6_K: _q6_k,
    Type.IQ4_XS: _iq4_xs,
    Type.Q1_0: _signs,
    Type.NVFP4: _nvfp4,
}
