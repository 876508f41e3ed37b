"""The per-slot tables on the GPU, and the updates that each step applies to them.

They are allocated once and never move, because captured graphs hold their addresses. Nothing waits
for the device: updates go through pinned memory, in the stream's order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.kernels.tables import update_block_tables
from penstock.engine.memory.host import to_device
from penstock.scheduler.types import ScheduledBatch, SlotAssignment


class DeviceTables:
    """One row for each slot, and a last one for the padding rows of a graph.

    token_table: (slots + 1, max_len + 1) int32. block_tables: (slots + 1, max_blocks) int32.
    lengths: (slots + 1,) int32, how many tokens have their keys and values written: the position
    of a decode's token. The last row's length is 0 and its block is `padding_block`.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        padding_block: int,
        device: torch.device,
    ) -> None:
        def table(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.padding_slot = max_num_seqs
        self.padding_kv_slot = padding_block * block_size
        self.block_size = block_size
        self.token_table = table(max_num_seqs + 1, max_model_len + 1)
        self.block_tables = table(max_num_seqs + 1, -(-max_model_len // block_size))
        self.block_tables[-1] = padding_block
        self.lengths = table(max_num_seqs + 1)
        self._device = device

    def apply(self, batch: ScheduledBatch) -> None:
        """Applies a batch's assignments, then its table updates."""
        for assignment in batch.assignments:
            self._assign(assignment)
        if batch.table_updates:
            update_block_tables(self.upload(batch.table_updates), self.block_tables)

    def upload(self, values: Sequence[object]) -> Tensor:
        """These integers as int32 on the device, in the same shape."""
        return to_device(values, torch.int32, self._device)

    def _assign(self, assignment: SlotAssignment) -> None:
        slot, token_ids, block_ids = assignment.slot, assignment.token_ids, assignment.block_ids
        values = self.upload((*token_ids, *block_ids))
        self.token_table[slot, : len(token_ids)] = values[: len(token_ids)]
        self.block_tables[slot, : len(block_ids)] = values[len(token_ids) :]
