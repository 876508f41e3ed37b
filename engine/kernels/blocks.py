"""Copies whole blocks of the KV pool, for a sequence that continues another's partial block, and
recurrent states."""

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.sizes import ceil_div

_BLOCK = 2048


def copy_blocks(copies: Tensor, keys: Tensor, values: Tensor | None = None) -> None:
    """Copies block source to block target in every layer, for each pair of copies, (N, 2) int32.

    keys, values: (layers, blocks, ...), or their scales; or states of one kind alone. No target may
    be a source, unless of itself.
    """
    size = keys[0, 0].numel()
    grid = (len(copies), len(keys), ceil_div(size, _BLOCK))
    _copy_blocks[grid](copies, keys, values, keys.shape[1], size, BLOCK=_BLOCK, num_warps=8)


def snapshot_states(
    snapshots: Tensor, block_tables: Tensor, matrices: Tensor, inputs: Tensor
) -> None:
    """Copies the state of each slot's sequence, in every layer, for each pair of (slot, state) of
    snapshots, (N, 2) int32.

    block_tables: of the group of states. matrices, inputs: see `StatePool`.
    """
    for tensor in (matrices, inputs):
        size = tensor[0, 0].numel()
        grid = (len(snapshots), len(tensor), ceil_div(size, _BLOCK))
        _snapshot_states[grid](
            snapshots, block_tables, tensor, block_tables.stride(0), tensor.shape[1], size,
            BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_blocks"])
def _copy_blocks(copies, keys, values, num_blocks, size, BLOCK: tl.constexpr):
    copy = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64) * num_blocks * size
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source = layer + tl.load(copies + 2 * copy).to(tl.int64) * size + column
    target = layer + tl.load(copies + 2 * copy + 1).to(tl.int64) * size + column
    mask = column < size
    tl.store(keys + target, tl.load(keys + source, mask=mask), mask=mask)
    if values is not None:
        tl.store(values + target, tl.load(values + source, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["table_stride", "num_states"])
def _snapshot_states(
    snapshots, block_tables, states, table_stride, num_states, size, BLOCK: tl.constexpr
):
    pair = snapshots + 2 * tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64) * num_states * size
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(block_tables + tl.load(pair).to(tl.int64) * table_stride).to(tl.int64)
    target = layer + tl.load(pair + 1).to(tl.int64) * size + column
    mask = column < size
    x = tl.load(states + layer + own * size + column, mask=mask)
    tl.store(states + target, x, mask=mask)
