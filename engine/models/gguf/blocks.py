"""What the blocks of a GGUF tensor stand for: its numbers, or the codes of a `GroupedLinear`.

Source of the layouts: ggml-common.h and ggml-quants.c of ggml. `raw`, in all of these, is the bytes
of some rows: (rows, bytes of a row) uint8.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.engine.gguf.tensor_types import TensorType
from penstock.engine.models.layers.grouped import packed_nibbles

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What the codes of IQ4 stand for.
_IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def numbers(raw: Tensor, kind: TensorType) -> Tensor:
    """(rows, columns): float32, or the type of the file where that is a plain one."""
    if kind.name in _PLAIN:
        return raw.view(_PLAIN[kind.name])
    blocks = raw.view(-1, kind.block_bytes)
    return _NUMBERS[kind.name](blocks).reshape(len(raw), -1)


def is_grouped(kind: TensorType) -> bool:
    """Whether a `GroupedLinear` computes it as it is."""
    return kind.name in ("Q8_0", "Q4_0", "IQ4_NL")


def grouped(raw: Tensor, kind: TensorType) -> tuple[Tensor, Tensor]:
    """The codes and scales of a `GroupedLinear` in groups of 32."""
    blocks = raw.view(len(raw), -1, kind.block_bytes)
    scales = _halves(blocks[..., :2]).squeeze(-1)
    if kind.name == "Q8_0":
        return blocks[..., 2:].flatten(1).view(torch.int8), scales
    return packed_nibbles(_nibbles(blocks[..., 2:]).flatten(1)), scales


def levels(kind: TensorType) -> Tensor | None:
    """Those of a `GroupedLinear` of this type."""
    return torch.tensor(_IQ4_LEVELS, dtype=torch.int8) if kind.name == "IQ4_NL" else None


def _halves(blocks: Tensor) -> Tensor:
    """Pairs of bytes as float16."""
    return blocks.contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """The low halves of some bytes, (..., n), and then the high ones: (..., 2n)."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q8_0(blocks: Tensor) -> Tensor:
    return _halves(blocks[:, :2]).float() * blocks[:, 2:].contiguous().view(torch.int8)


def _q4_0(blocks: Tensor) -> Tensor:
    return _halves(blocks[:, :2]).float() * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    scale, least = torch.split(_halves(blocks[:, :4]).float(), 1, dim=1)
    return scale * _nibbles(blocks[:, 4:]) + least


def _fifth_bits(packed: Tensor) -> Tensor:
    """Of 32 codes from 4 bytes: (blocks, 32), 0 or 16."""
    bits = packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).flatten(1) << 4


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _halves(blocks[:, :2]).float() * (codes.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    scale, least = torch.split(_halves(blocks[:, :4]).float(), 1, dim=1)
    return scale * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])) + least


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of the eight groups of 32 in a block of Q4_K or Q5_K: each (blocks, 8, 1) float32.

    Both are codes of 6 bits, packed in 12 bytes, and times a number of their own for the block.
    """
    scale, least = torch.split(_halves(blocks[:, :4]).float(), 1, dim=1)
    low, middle, high = torch.split(blocks[:, 4:16], 4, dim=1)
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), dim=1)
    return (scale * scales).unsqueeze(-1), (least * minima).unsqueeze(-1)


def _k_codes(packed: Tensor) -> Tensor:
    """(blocks, 128) to (blocks, 8, 32): of 32 bytes, the low halves are one group."""
    return _nibbles(packed.view(-1, 4, 32)).view(-1, 8, 32)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    return scales * _k_codes(blocks[:, 16:].contiguous()) - minima


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(blocks)
    group = torch.arange(8, dtype=torch.uint8).view(8, 1)
    fifth = blocks[:, 16:48].unsqueeze(1) >> group & 1
    return scales * (_k_codes(blocks[:, 48:].contiguous()) | fifth << 4) - minima


def _q6_k(blocks: Tensor) -> Tensor:
    low, high, scales, scale = torch.split(blocks, [128, 64, 16, 2], dim=1)
    pair = torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)
    upper = high.reshape(-1, 2, 1, 32) >> pair & 3
    lower = _nibbles(low.reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    codes = (lower | upper << 4).view(-1, 16, 16).float() - 32
    factors = _halves(scale).float() * scales.contiguous().view(torch.int8)
    return factors.unsqueeze(-1) * codes


def _iq4(codes: Tensor) -> Tensor:
    return torch.tensor(_IQ4_LEVELS, dtype=torch.float32)[codes.int()]


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _halves(blocks[:, :2]).float() * _iq4(_nibbles(blocks[:, 2:]))


def _iq4_xs(blocks: Tensor) -> Tensor:
    """Eight groups of 32, each with a scale of 6 bits: 4 of them in a half of a byte, and 2."""
    lower = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    pair = torch.arange(0, 8, 2, dtype=torch.uint8)
    upper = (blocks[:, 2:4].unsqueeze(-1) >> pair & 3).flatten(1)
    scales = _halves(blocks[:, :2]).float() * ((lower | upper << 4).float() - 32)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 8, 16))
    return scales.unsqueeze(-1) * _iq4(codes)


_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
