"""What a block is taken apart into, and how its bits are."""

from typing import NamedTuple

import torch
from torch import Tensor


class Unpacked(NamedTuple):
    """Some blocks, whose numbers are scale * (code - middle) - minimum each, or scale * level.

    codes: (blocks, numbers) uint8, or int8 around 0. scales and minima: (blocks, groups) float16,
    or float32, or int8, to be multiplied by the factors: (blocks, 1) float16.
    """

    codes: Tensor
    scales: Tensor
    factors: Tensor | None = None
    minima: Tensor | None = None
    minimum_factors: Tensor | None = None


def halves(blocks: Tensor) -> Tensor:
    """Pairs of bytes as float16."""
    return blocks.contiguous().view(torch.float16)


def signed(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.int8)


def planes(packed: Tensor, bits: int, size: int) -> Tensor:
    """Returns the numbers of so many bits in (blocks, bytes), each in a byte: of each `size` bytes
    those in the lowest bits, then those in the next, and so on."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).unsqueeze(1)
    return (packed.reshape(len(packed), -1, 1, size) >> shifts & (1 << bits) - 1).flatten(1)


def in_order(packed: Tensor, bits: int) -> Tensor:
    """Returns the numbers of so many bits, of each byte the lowest first."""
    return planes(packed, bits, 1)
