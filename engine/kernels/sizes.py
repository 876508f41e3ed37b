"""Arithmetic for launches. Triton's own functions cost 2 us per call on the host."""

from functools import cache
from typing import Any

import torch

# Multiprocessors of the device that tiles are chosen for; on others they are less even.
NUM_SMS = 132
# Of a block on a Hopper.
_SHARED_BYTES = 227 * 1024


@cache
def max_shared_bytes() -> int:
    """That a block may have on the device at hand; on a Hopper, where there is none."""
    if not torch.cuda.is_available():
        return _SHARED_BYTES
    device: Any = torch.cuda.get_device_properties()
    return int(device.shared_memory_per_block_optin)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n; n must be positive."""
    return 1 << (n - 1).bit_length()
