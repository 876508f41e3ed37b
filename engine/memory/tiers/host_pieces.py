"""`HostPieces`: memory of the host in slots, each for one block of a device's pool, or one
recurrent state, as one piece.

It may be pinned, so that a device copies to and from it by itself. Pinning takes a second for some
GiB, so the memory grows in slices, while the server already runs.
"""

from collections.abc import Callable, Sequence
from operator import mul
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from penstock.engine.memory.host import zeros_on_touch

_SLICE_BYTES = 2**28
_CHECKSUM = Struct("<q")


class HostPieces:
    """See `BlockMemory`: blocks are slots here, and their bytes a piece and then its checksum."""

    def __init__(
        self,
        piece_bytes: Sequence[int],
        num_slots: Sequence[int],
        pin: Callable[[Tensor], None] | None = None,
        slice_bytes: int = _SLICE_BYTES,
    ) -> None:
        """piece_bytes, num_slots: of each group of layers. slice_bytes: of all groups together,
        rounded to whole pieces. pin: pins the memory of a slice; raises RuntimeError where that is
        refused."""
        self._piece_bytes = piece_bytes
        self.num_slots = [*num_slots]
        self.num_grown = [0] * len(piece_bytes)
        """Slots of each group that are there."""
        self._pin = pin
        # A copy to or from a device must lie within what was pinned at once.
        num_slices = -(-sum(map(mul, piece_bytes, num_slots)) // slice_bytes)
        self._slice_slots = [-(-num // num_slices) for num in num_slots]
        self._slices: list[list[Tensor]] = [[] for _ in piece_bytes]
        self.checksums = [[0] * num for num in num_slots]

    @property
    def num_groups(self) -> int:
        return len(self._piece_bytes)

    def piece_bytes(self, group: int) -> int:
        return self._piece_bytes[group]

    def grow(self) -> list[range]:
        """Makes more slots for each group, and returns them; an empty list where all are there.
        Raises RuntimeError where the memory cannot be pinned."""
        each = zip(self.num_grown, self._slice_slots, self.num_slots, strict=True)
        made = [range(first, min(first + count, num)) for first, count, num in each]
        if not any(made):
            return []
        for slices, num_bytes, slots in zip(self._slices, self._piece_bytes, made, strict=True):
            memory = zeros_on_touch((len(slots), num_bytes), torch.uint8)
            if self._pin is not None and slots:
                self._pin(memory)
            slices.append(memory)
        self.num_grown = [slots.stop for slots in made]
        return made

    def runs(self, group: int, slots: Sequence[int]) -> list[Tensor]:
        """Their memory in this order, (n, piece_bytes) uint8 where n are next to each other."""
        found, start, slice_slots = [], 0, self._slice_slots[group]
        for end in range(1, len(slots) + 1):
            is_next = end < len(slots) and slots[end] == slots[end - 1] + 1
            if is_next and slots[end] % slice_slots:
                continue
            index, row = divmod(slots[start], slice_slots)
            found.append(self._slices[group][index][row : row + end - start])
            start = end
        return found

    def num_bytes(self, group: int) -> int:
        return self._piece_bytes[group] + _CHECKSUM.size

    def read(self, group: int, block_id: int) -> memoryview:
        content = np.empty(self.num_bytes(group), np.uint8)
        content[: -_CHECKSUM.size] = self._piece(group, block_id).numpy()
        found = content.data
        _CHECKSUM.pack_into(found, self._piece_bytes[group], self.checksums[group][block_id])
        return found

    def reach(self, group: int, block_id: int) -> None:
        """All of a slice is there."""

    def write(self, group: int, block_id: int, content: memoryview) -> None:
        found = np.frombuffer(content, np.uint8)
        self._piece(group, block_id).numpy()[...] = found[: -_CHECKSUM.size]
        (checksum,) = _CHECKSUM.unpack_from(content, self._piece_bytes[group])
        self.checksums[group][block_id] = checksum

    def _piece(self, group: int, slot: int) -> Tensor:
        return self.runs(group, (slot,))[0][0]
