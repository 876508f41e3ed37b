"""`Board`: where each rank is, and how long it computed, in memory that all of them have. The first
is for the message of a hang, since a GPU's collectives do not tell who is missing."""

import mmap
import os
import struct

from penstock.engine.ranks.group import Doing

# step, phase. Shorter than a cache line, so that ranks do not disturb each other.
_ENTRY = struct.Struct("<q48s")
_ENTRY_BYTES = 64
# step, seconds. A rank's last ones: more than steps can be in flight.
_TIME = struct.Struct("<qd")
_NUM_TIMES = 64
_RANK_BYTES = _ENTRY_BYTES + _NUM_TIMES * _TIME.size


class Board:
    """A line for each rank, which that rank writes and all may read. A line that is read while it
    is written may be wrong."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: of `board_memory`, which the other ranks must inherit."""
        self._memory = mmap.mmap(descriptor, 0)

    def write(self, rank: int, step: int, phase: str) -> None:
        entry = step, phase.encode("ascii", "replace")
        _ENTRY.pack_into(self._memory, rank * _RANK_BYTES, *entry)

    def read(self, rank: int) -> Doing:
        step, phase = _ENTRY.unpack_from(self._memory, rank * _RANK_BYTES)
        return Doing(step, phase.rstrip(b"\0").decode("ascii", "replace") or "its start")

    def record(self, rank: int, step: int, seconds: float) -> None:
        """How long it computed a step."""
        _TIME.pack_into(self._memory, _time_offset(rank, step), step, seconds)

    def computed_s(self, rank: int, step: int) -> float | None:
        """None where it has not recorded it, or long ago."""
        recorded, seconds = _TIME.unpack_from(self._memory, _time_offset(rank, step))
        return seconds if recorded == step else None


def _time_offset(rank: int, step: int) -> int:
    return rank * _RANK_BYTES + _ENTRY_BYTES + step % _NUM_TIMES * _TIME.size


def board_memory(size: int) -> int:
    """A descriptor. The memory has no name in a file system, and is gone with the last rank."""
    descriptor = os.memfd_create("penstock-board")
    os.ftruncate(descriptor, size * _RANK_BYTES)
    return descriptor
