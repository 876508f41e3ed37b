"""`CodedWeight`: a weight in codes, as the kernels of this folder read it. Needs torch alone."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedWeight:
    """W[n, k] = scales[g, n] * (code[n, k] - zeros[g, n]), where g is k // group_size.

    codes: (out_features, row_bytes) int8 or uint8, row_bytes a multiple of 2 * run. Of 8 bits, a
    byte is a code: an integer (int8), or a float8_e4m3fn (uint8). Of 4, a byte b has the code of
    column 2 * run * (b // run) + b % run in its low half, and of that plus `run` in its high half:
    so a thread's codes are neighbours of one group. scales: (groups, out_features) float32, as the
    copies that run ahead have 4 bytes at least; or int32, (groups / 2, out_features): of two groups
    float16 each, the first one's in the low half, where the halves of bytes are of two groups.
    zeros: None, or as the scales; of 4 bits less 8. run: divides group_size, 16 at least. levels:
    what the 16 codes of 4 bits stand for instead, as four words of four bytes.
    """

    bits: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    run: int
    columns: int
    levels: tuple[int, int, int, int] | None

    @property
    def out_features(self) -> int:
        return len(self.codes)

    @property
    def constants(self) -> dict[str, Any]:
        """Kernels are compiled for these."""
        return {
            "BITS": self.bits,
            "GROUP_SIZE": self.group_size,
            "LEVELS": self.levels,
            "RUN": self.run,
        }
