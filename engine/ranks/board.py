"""`Board`: where each rank is, in memory that all of them have. For the message of a hang, since a
GPU's collectives do not tell who is missing."""

import mmap
import os
import struct
from typing import NamedTuple

# step, phase. Shorter than a cache line, so that ranks do not disturb each other.
_ENTRY = struct.Struct("<q48s")
_ENTRY_BYTES = 64


class Place(NamedTuple):
    """step: of the scheduler, 0 at the start."""

    step: int
    phase: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}" if self.step else self.phase


class Board:
    """A line for each rank, which that rank writes and all may read. A line that is read while it
    is written may be wrong."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: of `board_memory`, which the other ranks must inherit."""
        self._memory = mmap.mmap(descriptor, 0)

    def write(self, rank: int, step: int, phase: str) -> None:
        entry = step, phase.encode("ascii", "replace")
        _ENTRY.pack_into(self._memory, rank * _ENTRY_BYTES, *entry)

    def read(self, rank: int) -> Place:
        step, phase = _ENTRY.unpack_from(self._memory, rank * _ENTRY_BYTES)
        return Place(step, phase.rstrip(b"\0").decode("ascii", "replace") or "its start")


def board_memory(size: int) -> int:
    """A descriptor. The memory has no name in a file system, and is gone with the last rank."""
    descriptor = os.memfd_create("penstock-board")
    os.ftruncate(descriptor, size * _ENTRY_BYTES)
    return descriptor
