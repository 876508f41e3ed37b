"""Weight formats by name, and the layout that a GPU has of codes. Imports no tensors."""

from dataclasses import dataclass
from math import gcd

# Parts [begin, end) of the rows, or columns, of a matrix, one after the other.
Spans = tuple[tuple[int, int], ...]
# Codes of 4 bits that stand for the numbers of a table.
LEVELS_FORMAT = "int4 levels"
# Integers of which each column has scales of its own; no path computes with such codes.
BY_COLUMN_FORMAT = "integers by column"
# e4m3, with a scale for each block.
FP8_FORMAT = "fp8"
# Columns whose codes are in neighbouring bytes, by bits: in registers, 64 bytes of 8 bits take as
# much as 32 of 4. A product on the matrix units takes 16.
_RUNS = {8: (64, 32, 16), 4: (32, 16)}
_FLOAT32_BYTES = 4


def integer_format(bits: int, is_symmetric: bool) -> str:
    return f"int{bits}" if is_symmetric else f"int{bits} asymmetric"


def block_format(bits: int, *, has_minima: bool) -> str:
    """Names the blocks of GGUF: codes of 4, 5 or 6 bits, whose scales may be codes themselves."""
    return f"blocks of int{bits}" + " with minima" * has_minima


def sizes_of_parts(columns: Spans, group_size: int, factor_columns: int) -> tuple[int, int]:
    """Returns the sizes of groups, and of what has a factor in common, in a matrix of these columns
    of another, whose sizes are given: smaller ones, where a part begins or ends within one."""
    bounds = [bound for span in columns for bound in span]
    return gcd(group_size, *bounds), gcd(factor_columns, *bounds[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedLayout:
    """How a `CodedWeight` of so many columns lies in memory. is_paired: scales and zeros are
    float16, of two groups in a word."""

    bits: int
    columns: int
    group_size: int
    run: int
    is_paired: bool
    has_zeros: bool

    @classmethod
    def fitting(
        cls, bits: int, group_size: int, columns: int, *, has_zeros: bool, has_halves: bool
    ) -> "CodedLayout | None":
        """Returns None where no run divides the groups. has_halves: scales are float16."""
        is_one = group_size >= columns
        run = next((run for run in _RUNS[bits] if is_one or group_size % run == 0), None)
        if run is None:
            return None
        return cls(
            bits=bits,
            columns=columns,
            group_size=columns if is_one else group_size,
            run=run,
            is_paired=bits == 4 and group_size == run and not is_one and has_halves,
            has_zeros=has_zeros,
        )

    @property
    def padded_columns(self) -> int:
        return -(-self.columns // (2 * self.run)) * 2 * self.run

    @property
    def row_bytes(self) -> int:
        return self.padded_columns * self.bits // 8

    def num_bytes(self, out_features: int) -> int:
        """Returns `CodedLinear.num_bytes` without the bias."""
        groups = -(-self.columns // self.group_size)
        words = -(-groups // 2) if self.is_paired else groups
        tables = words * _FLOAT32_BYTES * (1 + self.has_zeros)
        return out_features * (self.row_bytes + tables)
