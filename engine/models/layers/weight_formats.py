"""The formats of the weights that layers have, by name. Imports no tensors."""

# Codes of 4 bits that stand for the numbers of a table.
LEVELS_FORMAT = "int4 levels"
# e4m3, with a scale for each block.
FP8_FORMAT = "fp8"


def integer_format(bits: int, is_symmetric: bool) -> str:
    return f"int{bits}" if is_symmetric else f"int{bits} asymmetric"


def block_format(bits: int, *, has_minima: bool) -> str:
    """Of GGUF's blocks: codes of 4, 5 or 6 bits, whose scales may be codes themselves."""
    return f"blocks of int{bits}" + " with minima" * has_minima
