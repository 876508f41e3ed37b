"""`gather_input`: `build_model_input` on a CPU, in one call of C++ (inputs.h)."""

import ctypes
from ctypes import Structure, c_int64
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.native.structures import structure
from penstock.engine.step.model_input import ModelInput, num_single, sample_rows
from penstock.scheduler.types import ScheduledBatch

_GATHER = structure("Gather", "native/step/inputs.h")


class GatheredInput(NamedTuple):
    """step: whose tensors `wanted` fills. arrays: to be kept as long as it is used."""

    step: ModelInput
    wanted: Structure
    arrays: tuple[object, ...]


def gather_input(
    library: ctypes.CDLL,
    batch: ScheduledBatch,
    token_table: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> ModelInput:
    """Returns what `build_model_input` does; block_tables is not written past what its row uses.
    library: see `load_library`. The tables are contiguous."""
    step, wanted, _ = input_to_gather(batch, token_table, block_tables, block_size)
    library.penstock_gather(ctypes.byref(wanted))
    return step


def input_to_gather(
    batch: ScheduledBatch, token_table: Tensor, block_tables: Tensor, block_size: int
) -> GatheredInput:
    """Returns what `penstock_gather` is called with."""
    *groups, num_slots, max_blocks = block_tables.shape
    num_sequences, num_tokens = len(batch.slots), sum(batch.num_tokens)
    token_ids, positions = torch.empty(2, num_tokens, dtype=torch.int64).unbind()
    query_starts = [0, *accumulate(batch.num_tokens)]
    step = ModelInput(
        token_ids=token_ids,
        positions=positions,
        kv_slots=torch.empty(*groups, num_tokens, dtype=torch.int64),
        block_tables=torch.empty(*groups, num_sequences, max_blocks, dtype=torch.int32),
        query_starts=query_starts,
        context_lens=[s + n for s, n in zip(batch.starts, batch.num_tokens, strict=True)],
        num_decodes=num_single(batch),
        sample_rows=torch.tensor(sample_rows(batch), dtype=torch.int64),
        snapshots=batch.snapshots,
        num_drafts=tuple(map(len, batch.drafts)),
    )
    numbers = c_int64 * num_sequences
    slots, starts, counts = (
        numbers(*each) for each in (batch.slots, batch.starts, batch.num_tokens)
    )
    wanted = _GATHER(
        sequences=num_sequences,
        tokens_step=token_table.shape[1],
        max_blocks=max_blocks,
        block_size=block_size,
        slots=ctypes.addressof(slots),
        starts=ctypes.addressof(starts),
        counts=ctypes.addressof(counts),
        token_table=token_table.data_ptr(),
        block_tables=block_tables.data_ptr(),
        token_ids=step.token_ids.data_ptr(),
        positions=step.positions.data_ptr(),
        kv_slots=step.kv_slots.data_ptr(),
        blocks=step.block_tables.data_ptr(),
        groups=groups[0] if groups else 1,
        slots_of_group=num_slots,
        tokens=num_tokens,
    )
    return GatheredInput(step, wanted, (slots, starts, counts))
