"""`gather_input`: `build_model_input` on a CPU, in one call of C++ (inputs.h)."""

import ctypes
from ctypes import c_int32, c_int64

import torch
from torch import Tensor

from penstock.engine.model_input import ModelInput
from penstock.engine.native.structures import structure
from penstock.scheduler.types import ScheduledBatch

_GATHER = structure("Gather", "native/step/inputs.h")


def gather_input(
    library: ctypes.CDLL,
    batch: ScheduledBatch,
    token_table: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> ModelInput:
    """Returns what `build_model_input` does; block_tables is not written past what its row uses.

    library: see `load_library`. The tables are contiguous.
    """
    num_sequences = len(batch.slots)
    numbers = c_int64 * num_sequences
    slots, starts = numbers(*batch.slots), numbers(*batch.starts)
    counts = numbers(*batch.num_tokens)
    num_tokens = sum(batch.num_tokens)
    *groups, num_slots, max_blocks = block_tables.shape
    num_groups = groups[0] if groups else 1
    of_tokens = torch.empty(2, num_tokens, dtype=torch.int64)
    token_ids, positions = of_tokens.unbind()
    kv_slots = torch.empty(*groups, num_tokens, dtype=torch.int64)
    blocks = torch.empty(*groups, num_sequences, max_blocks, dtype=torch.int32)
    query_starts = (c_int32 * (num_sequences + 1))()
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
        token_ids=token_ids.data_ptr(),
        positions=positions.data_ptr(),
        kv_slots=kv_slots.data_ptr(),
        blocks=blocks.data_ptr(),
        query_starts=ctypes.addressof(query_starts),
        groups=num_groups,
        slots_of_group=num_slots,
        tokens=num_tokens,
    )
    library.penstock_gather(ctypes.byref(wanted))
    ends = query_starts[1:]
    last_rows = [end - 1 for end, samples in zip(ends, batch.samples, strict=True) if samples]
    return ModelInput(
        token_ids=token_ids,
        positions=positions,
        kv_slots=kv_slots,
        block_tables=blocks,
        query_starts=list(query_starts),
        context_lens=[s + n for s, n in zip(batch.starts, batch.num_tokens, strict=True)],
        num_decodes=batch.num_decodes,
        sample_rows=torch.tensor(last_rows, dtype=torch.int64),
    )
