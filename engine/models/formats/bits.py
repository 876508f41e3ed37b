"""Small numbers in integers of 32 bits."""

import torch
from torch import Tensor


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Numbers of 4 or 8 bits in the last dimension, the first in the lowest bits: uint8.

    packed: int32.
    """
    in_bytes = packed.contiguous().view(torch.uint8)  # of little-endian machines, as all are today
    if bits == 8:
        return in_bytes
    return torch.stack((in_bytes & 15, in_bytes >> 4), dim=-1).flatten(-2)
