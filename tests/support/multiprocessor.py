"""What a multiprocessor of an H100 or H200 (sm_90) holds, and what a program takes of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """registers: of 32 bits, as they are allocated. shared_bytes: with what CUDA reserves."""

    registers: int
    shared_bytes: int
    warps: int
    programs: int = 1

    def times(self, one: "Room") -> int:
        """How many of these programs have room in it."""
        return min(
            self.registers // one.registers,
            self.shared_bytes // one.shared_bytes,
            self.warps // one.warps,
            self.programs // one.programs,
        )

    def plus(self, one: "Room", count: int = 1) -> "Room":
        """With so many of these programs more; less where count is negative."""
        return Room(
            self.registers + count * one.registers,
            self.shared_bytes + count * one.shared_bytes,
            self.warps + count * one.warps,
            self.programs + count * one.programs,
        )


# From the CUDA programming guide: of a multiprocessor, and what each program has reserved.
WHOLE = Room(registers=65536, shared_bytes=228 * 1024, warps=64, programs=32)
_RESERVED = 1024
# The figures of a compiled kernel that say how much room its programs take.
ROOM = ("warps", "registers", "shared_bytes")


def room_of(*, warps: int, registers: int, shared_bytes: int) -> Room:
    """registers: of a thread; they are allocated in eights, by warps."""
    return Room(-(-registers // 8) * 8 * 32 * warps, shared_bytes + _RESERVED, warps)
