"""`HostIds`: memory of the host in which captured steps leave the ids that they sample.

A copy between two graphs would hold up the second until a copy engine has started and ended. Pinned
memory has an address on the device too, and the host sees what kernels have written there once it
has seen an event that was recorded after them (CUDA C++ Programming Guide, "Mapped Memory"); Triton
asks the driver for that address (`cuPointerGetAttribute`).

A graph's addresses never change, so the device itself counts the steps, and each writes the next
row, in turn. There are as many rows as steps that may be launched and not collected, and steps are
collected in their order: a row is written again only after it has been read.
"""

import torch


class HostIds:
    """rows: (steps in flight, numbers) int32, of the host. turn: (1,) int32 on the device, the row
    of the step that it computes; the step's first kernel counts it on, the last one writes."""

    def __init__(self, num_in_flight: int, num_numbers: int, device: torch.device) -> None:
        """num_numbers: that a step may leave: an id of each row; where rows have drafts, as of
        `accept_drafts`."""
        shape, pins = (num_in_flight, num_numbers), device.type == "cuda"
        self.rows = torch.zeros(shape, dtype=torch.int32, pin_memory=pins)
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)
        self._turn = 0

    def launched(self) -> torch.Tensor:
        """The row of the step that has just been launched, (numbers,): to be read once the device
        has passed an event that is recorded after it, and before so many more are launched."""
        self._turn = (self._turn + 1) % len(self.rows)
        return self.rows[self._turn]

    def restart(self) -> None:
        """After steps that were not counted by `launched`."""
        self.turn.zero_()
        self._turn = 0
