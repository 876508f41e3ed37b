"""The formats of weights that the C++ multiplies as codes, and the source that does so."""

import itertools

from penstock.engine.models.layers.weight_formats import (
    FP8_FORMAT,
    LEVELS_FORMAT,
    block_format,
    integer_format,
)

# In the order of `Formats` (products/formats.h), which counts them from 1.
FORMATS_BY_SOURCE = {
    "grouped": (
        *(
            integer_format(bits, is_symmetric=symmetric)
            for bits in (8, 4)
            for symmetric in (True, False)
        ),
        LEVELS_FORMAT,
    ),
    "blocks": (
        block_format(4, has_minima=False),
        block_format(4, has_minima=True),
        block_format(5, has_minima=False),
        block_format(5, has_minima=True),
        block_format(6, has_minima=False),
    ),
    "fp8": (FP8_FORMAT,),
}
CODE_FORMATS = tuple(itertools.chain.from_iterable(FORMATS_BY_SOURCE.values()))


def format_number(weight_format: str) -> int:
    """Returns the `Linear::format` of structs.h."""
    return 1 + next(i for i, each in enumerate(FORMATS_BY_SOURCE.values()) if weight_format in each)
