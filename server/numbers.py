"""Numbers in headers, queries and flags, whose errors have the names of these functions."""

import math
import re

# float() reads 1_000, nan, infinity, other scripts' digits and spaces around them, too.
_PLAIN = re.compile(r"[0-9.eE+-]{1,40}")


def number(text: str) -> float:
    """A finite decimal number in ASCII, such as 250, 0.5 or 1e3. Raises ValueError."""
    value = float(text) if _PLAIN.fullmatch(text) else math.nan
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def integer(text: str) -> int:
    """The same without a fraction. Raises ValueError."""
    number(text)
    return int(text)
