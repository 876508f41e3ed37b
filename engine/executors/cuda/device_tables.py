"""The per-slot tables on the GPU, and the updates that each step applies to them.

They are allocated once and never move, because captured graphs hold their addresses. Nothing waits
for the device: updates go through pinned memory, in the stream's order.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from penstock.engine.kernels.tables import update_table
from penstock.engine.memory.host import to_device
from penstock.scheduler.types import ScheduledBatch, SlotAssignment


class DeviceTables:
    """One row for each slot, and a last one for the padding rows of a graph.

    token_table: (slots + 1, max_len + 1) int32. block_tables: (slots + 1, max_blocks) int32, for
    each group of layers; all_block_tables: those of all. lengths: (slots + 1,) int32, how many
    tokens have their keys and values written: the position of a decode's token. The last row's
    length is 0 and its block is the padding block of each group.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        padding_blocks: Sequence[int],
        device: torch.device,
    ) -> None:
        def table(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.padding_slot = max_num_seqs
        self.padding_kv_slots = [block * block_size for block in padding_blocks]
        self.block_size = block_size
        self.token_table = table(max_num_seqs + 1, max_model_len + 1)
        num_groups, max_blocks = len(padding_blocks), -(-max_model_len // block_size)
        self.all_block_tables = table(num_groups, max_num_seqs + 1, max_blocks)
        self.block_tables = self.all_block_tables.unbind()
        for block_table, block in zip(self.block_tables, padding_blocks, strict=True):
            block_table[-1] = block
        # A row for each slot of the first group, then of the next.
        self._rows = self.all_block_tables.view(num_groups * (max_num_seqs + 1), max_blocks)
        self.lengths = table(max_num_seqs + 1)
        self._device = device

    def apply(self, batch: ScheduledBatch) -> None:
        """Applies a batch's assignments, then its table updates."""
        for assignment in batch.assignments:
            self._assign(assignment)
        if batch.table_updates:
            rows = self.padding_slot + 1
            updates = [
                (group * rows + slot, index, block_id)
                for slot, index, block_id, group in batch.table_updates
            ]
            update_table(self.upload(updates), self._rows)

    def upload(self, values: Sequence[object]) -> Tensor:
        """These integers as int32 on the device, in the same shape."""
        return to_device(values, torch.int32, self._device)

    def _assign(self, assignment: SlotAssignment) -> None:
        slot, token_ids = assignment.slot, assignment.token_ids
        values = self.upload((*token_ids, *chain.from_iterable(assignment.tables)))
        self.token_table[slot, : len(token_ids)] = values[: len(token_ids)]
        start = len(token_ids)
        for block_table, block_ids in zip(self.block_tables, assignment.tables, strict=True):
            block_table[slot, : len(block_ids)] = values[start : start + len(block_ids)]
            start += len(block_ids)
