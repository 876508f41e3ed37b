"""Arithmetic for launches. Triton's own functions cost 2 us per call on the host."""

# Multiprocessors of the device that tiles are chosen for; on others they are less even.
NUM_SMS = 132


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n; n must be positive."""
    return 1 << (n - 1).bit_length()
