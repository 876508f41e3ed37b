"""Moves whole blocks of the KV pool, and recurrent states: copies within the pool, for a sequence
that continues another's partial block; and pieces, which have a block's part of every layer.

A piece is as many words of 4 bytes, layer after layer of each tensor of a pool. Its checksum is the
sum, modulo 2^64, of each word times an odd number of 32 bits made of its place, plus a seed: a
change in one word always changes it, and others all but never do (a multilinear hash, Lemire and
Kaser 2014, arXiv:1202.4961). Sums in any order are the same, so programs add to it as they run.
"""

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.sizes import ceil_div

_BLOCK = 2048
_PIECE_BLOCK = 4096


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


def gather_blocks(
    block_ids: Tensor, words: Tensor, start: int, pieces: Tensor, checksums: Tensor
) -> None:
    """Copies blocks from all layers of one tensor to where it begins in each piece, and adds to
    their checksums.

    block_ids: (N,) int32. words: (layers, blocks, n) int32, of the pool. pieces: (N, m) int32.
    checksums: (N,) int64.
    """
    size = words.shape[2]
    grid = (len(block_ids), len(words), ceil_div(size, _PIECE_BLOCK))
    _gather_blocks[grid](
        block_ids, words, start, pieces, checksums, words.shape[1], size, pieces.shape[1],
        BLOCK=_PIECE_BLOCK, num_warps=8,
    )  # fmt: skip


def add_checksums(pieces: Tensor, checksums: Tensor) -> None:
    """Adds those of whole pieces, (N, m) int32, to checksums, (N,) int64."""
    size = pieces.shape[1]
    _add_checksums[len(pieces), ceil_div(size, _PIECE_BLOCK)](
        pieces, checksums, size, BLOCK=_PIECE_BLOCK, num_warps=8
    )


def scatter_blocks(
    block_ids: Tensor,
    words: Tensor,
    start: int,
    pieces: Tensor,
    checksums: Tensor,
    expected: Tensor,
) -> None:
    """The opposite of `gather_blocks`, of those pieces alone whose checksum is the expected one.
    Tensors as there."""
    size = words.shape[2]
    grid = (len(block_ids), len(words), ceil_div(size, _PIECE_BLOCK))
    _scatter_blocks[grid](
        block_ids, words, start, pieces, checksums, expected, words.shape[1], size, pieces.shape[1],
        BLOCK=_PIECE_BLOCK, num_warps=8,
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


@triton.jit
def _checksum(words, place):
    factor = place.to(tl.uint32) * 0x1E3779B1
    factor = (factor ^ (factor >> 15)) * 0x45D9F3B
    factor = (factor ^ (factor >> 16)) | 1
    return tl.sum(words.to(tl.uint32, bitcast=True).to(tl.int64) * factor.to(tl.int64))


@triton.jit(do_not_specialize=["start", "num_blocks"])
def _gather_blocks(
    block_ids, words, start, pieces, checksums, num_blocks, size, piece_size, BLOCK: tl.constexpr
):
    number = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    block = tl.load(block_ids + number).to(tl.int64)
    x = tl.load(words + (layer * num_blocks + block) * size + column, mask=mask, other=0)
    place = start + layer * size + column
    tl.store(pieces + number * piece_size + place, x, mask=mask)
    tl.atomic_add(checksums + number, _checksum(x, place))


@triton.jit
def _add_checksums(pieces, checksums, size, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(pieces + number * size + place, mask=place < size, other=0)
    tl.atomic_add(checksums + number, _checksum(x, place))


@triton.jit(do_not_specialize=["start", "num_blocks"])
def _scatter_blocks(
    block_ids, words, start, pieces, checksums, expected, num_blocks, size, piece_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    block = tl.load(block_ids + number).to(tl.int64)
    place = start + layer * size + column
    if tl.load(checksums + number) == tl.load(expected + number):
        x = tl.load(pieces + number * piece_size + place, mask=mask)
        tl.store(words + (layer * num_blocks + block) * size + column, x, mask=mask)
