"""Arithmetic for launching. Triton's own functions of these names cost 2 us a call on the host."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2_from(n: int) -> int:
    """The smallest that is not below n, n being positive."""
    return 1 << (n - 1).bit_length()
