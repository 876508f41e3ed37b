"""Gathers blocks of the KV pool from all layers into one piece each, and scatters pieces back.

A piece is as many words of 4 bytes, layer after layer of each tensor of a pool. Its checksum is the
sum, modulo 2^64, of each word times an odd number of 32 bits made of its place, plus a seed: a
change in one word always changes it, and others all but never do (a multilinear hash, Lemire and
Kaser 2014, arXiv:1202.4961). Sums in any order are the same, so programs add to it as they run.
"""

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.sizes import ceil_div

_BLOCK = 4096


def gather_blocks(
    block_ids: Tensor, words: Tensor, start: int, pieces: Tensor, checksums: Tensor
) -> None:
    """Copies blocks from all layers of one tensor to where it begins in each piece, and adds to
    their checksums.

    block_ids: (N,) int32. words: (layers, blocks, n) int32, of the pool. pieces: (N, m) int32.
    checksums: (N,) int64.
    """
    size = words.shape[2]
    grid = (len(block_ids), len(words), ceil_div(size, _BLOCK))
    _gather_blocks[grid](
        block_ids, words, start, pieces, checksums, words.shape[1], size, pieces.shape[1],
        BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


def add_checksums(pieces: Tensor, checksums: Tensor) -> None:
    """Adds those of whole pieces, (N, m) int32, to checksums, (N,) int64."""
    size = pieces.shape[1]
    _add_checksums[len(pieces), ceil_div(size, _BLOCK)](
        pieces, checksums, size, BLOCK=_BLOCK, num_warps=8
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
    grid = (len(block_ids), len(words), ceil_div(size, _BLOCK))
    _scatter_blocks[grid](
        block_ids, words, start, pieces, checksums, expected, words.shape[1], size, pieces.shape[1],
        BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


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
