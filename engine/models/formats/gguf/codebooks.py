"""Types whose codes are entries of a codebook: IQ1, IQ2 and IQ3.

An entry is four or eight numbers, each the magnitude of a few; a bit for each number, or for the
group, says which sign they have. So a number has a code of 4 bits, whose highest is that bit.

The codebooks are in codebooks.txt. `blocks`: see integers.py, and there for the source, too.
"""

from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from penstock.engine.models.formats.gguf.unpacked import Unpacked, halves, in_order

# Of 8 signs, 7 are stored, and an even number of them is negative.
_SIGNS = torch.tensor([low | low.bit_count() % 2 << 7 for low in range(128)], dtype=torch.uint8)


def iq2_xxs(blocks: Tensor) -> Unpacked:
    words = blocks[:, 2:].reshape(-1, 8)
    scales, signs = _scales_and_signs(words[:, 4:])
    indices = words[:, :4].reshape(len(blocks), -1)
    return _unpacked("IQ2_XXS", indices, signs, scales.view(len(blocks), -1), blocks)


def iq2_xs(blocks: Tensor) -> Unpacked:
    both = _words(blocks[:, 2:66], torch.int16)
    signs = in_order(_SIGNS[both >> 9], 1)
    return _unpacked("IQ2_XS", both & 511, signs, in_order(blocks[:, 66:], 4), blocks)


def iq2_s(blocks: Tensor) -> Unpacked:
    low, signs, high, scales = torch.split(blocks[:, 2:], [32, 32, 8, 8], dim=1)
    indices = low.int() | in_order(high, 2).int() << 8
    return _unpacked("IQ2_S", indices, in_order(signs, 1), in_order(scales, 4), blocks)


def iq3_xxs(blocks: Tensor) -> Unpacked:
    scales, signs = _scales_and_signs(blocks[:, 66:].reshape(-1, 4))
    return _unpacked("IQ3_XXS", blocks[:, 2:66], signs, scales.view(len(blocks), -1), blocks)


def iq3_s(blocks: Tensor) -> Unpacked:
    low, high, signs, scales = torch.split(blocks[:, 2:], [64, 8, 32, 4], dim=1)
    indices = low.int() | in_order(high, 1).int() << 8
    return _unpacked("IQ3_S", indices, in_order(signs, 1), in_order(scales, 4), blocks)


def iq1_s(blocks: Tensor) -> Unpacked:
    words = _words(blocks[:, 34:], torch.int16)
    indices = blocks[:, 2:34].int() | _threes(words, 4) << 8
    is_less = (words >> 15).to(torch.uint8).repeat_interleave(32, dim=1)
    return _unpacked("IQ1", indices, is_less, words >> 12 & 7, blocks)


def iq1_m(blocks: Tensor) -> Unpacked:
    """The factor is in the highest halves of bytes of four words, whose other bits are scales."""
    low, high, scales = torch.split(blocks, [32, 16, 8], dim=1)
    words, high = _words(scales, torch.int16), in_order(high, 4)
    shifts = torch.arange(0, 16, 4)
    factors = (words >> 12 << shifts).sum(1, keepdim=True).to(torch.int16).view(torch.uint8)
    indices = low.int() | (high & 7).int() << 8
    is_less = (high >> 3).repeat_interleave(8, dim=1)
    return _unpacked("IQ1", indices, is_less, _threes(words, 4), factors)


def _unpacked(
    name: str, indices: Tensor, is_negative: Tensor, scales: Tensor, blocks: Tensor
) -> Unpacked:
    """indices: of entries. is_negative: of each number. scales: codes of odd numbers. blocks: the
    factors are what they begin with."""
    codes = _codebook(name)[indices.long()].flatten(1)
    codes |= is_negative.reshape(codes.shape) << 3
    return Unpacked(codes, (2 * scales + 1).to(torch.int8), halves(blocks[:, :2]))


def _scales_and_signs(words: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the highest 4 bits of 32, (words, 4 bytes), and the signs that the others stand
    for: four times 8, a byte each."""
    both = _words(words, torch.int32)
    signs = _SIGNS[both >> torch.arange(0, 28, 7) & 127]
    return both >> 28 & 15, in_order(signs, 1)


def _threes(words: Tensor, num: int) -> Tensor:
    """Returns the numbers of 3 bits in words, the lowest first."""
    return (words.unsqueeze(2) >> torch.arange(0, 3 * num, 3) & 7).flatten(1)


def _words(packed: Tensor, kind: torch.dtype) -> Tensor:
    """Bytes as unsigned numbers of this size, in int64."""
    mask = (1 << 8 * kind.itemsize) - 1
    return packed.contiguous().view(kind).long() & mask


@cache
def _codebook(name: str) -> Tensor:
    """(entries, numbers) uint8, the codes of magnitudes: see `blocks`."""
    text = files(__package__).joinpath("codebooks.txt").read_text(encoding="utf-8")
    lines = (line.split() for line in text.splitlines() if not line.startswith("#"))
    numbers, bits, content = next(rest for first, *rest in lines if first == name)
    packed = torch.frombuffer(bytearray.fromhex(content), dtype=torch.uint8)
    return in_order(packed.unsqueeze(0), int(bits)).view(-1, int(numbers))
