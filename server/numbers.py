"""Numbers in texts that others send: headers, queries and flags."""

import math
import re

# float() reads 1_000, nan, infinity, other scripts' digits and spaces around them, too.
_PLAIN = re.compile(r"[0-9.eE+-]{1,40}")


def plain_number(text: str) -> float:
    """Returns NaN for what is not a finite decimal number in ASCII, such as 250, 0.5 or 1e3."""
    try:
        number = float(text) if _PLAIN.fullmatch(text) else math.nan
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan
