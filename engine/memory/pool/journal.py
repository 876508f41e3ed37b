"""`Journal`: which blocks of a pool are complete, kept beside the pool, for the next engine.

It has an entry for each block of the pool, in the block's place, so it neither grows nor needs to
be cleaned up:

    digest 16 | parent 16 | tick 8 | checksum 4 | check 4      (48 bytes, little-endian)

tick counts the blocks that were completed. checksum is the CRC-32 of the block's bytes, over all
layers of keys, then of values, then of scales; check that of the entry before it, begun with the
block's number. An entry is written after its block is complete, and erased before the block may be
written to again. So whatever instruction a process is killed at, an entry is whole and its block is
as the checksum says, or it is not believed. The memory does not outlive the machine, so nothing is
flushed.

It knows bytes, and neither tensors nor sequences.
"""

import logging
import struct
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple
from zlib import crc32

from penstock.scheduler.cache.journal import StoredBlock

logger = logging.getLogger(__name__)

_ENTRY = struct.Struct("<16s16sQI")
_CHECK = struct.Struct("<I")
ENTRY_BYTES = _ENTRY.size + _CHECK.size


class Part(NamedTuple):
    """A tensor of the pool, (num_layers, num_blocks, ...), whose bytes begin at `offset`.
    block_bytes: of one block in one layer."""

    offset: int
    num_layers: int
    block_bytes: int


class _Entry(NamedTuple):
    block: StoredBlock
    tick: int
    checksum: int


class Journal:
    """See `penstock.scheduler.cache.journal.BlockJournal`."""

    def __init__(
        self, memory: memoryview, table: int, num_blocks: int, parts: Sequence[Part], key: bytes
    ) -> None:
        """memory: all of it, bytes. table: where in it the entries begin."""
        self._memory = memory
        self._table = table
        self._num_blocks = num_blocks
        self._parts = parts
        self.key = key
        self._tick = 0
        self._checksums: dict[int, int] = {}  # of survivors

    def survivors(self) -> list[StoredBlock]:
        entries: dict[bytes, _Entry] = {}
        for entry in self._read():
            # One block is recorded for a digest; of two, either will do.
            if entries.setdefault(entry.block.digest, entry) is not entry:
                self.erase(entry.block.block_id)
        self._tick = max((entry.tick for entry in entries.values()), default=0)
        self._checksums = {entry.block.block_id: entry.checksum for entry in entries.values()}
        if entries:
            logger.info(
                "blocks of keys and values that an earlier engine computed: %d", len(entries)
            )
        return _in_order_of_eviction(entries)

    def is_intact(self, block_id: int) -> bool:
        is_intact = self.checksum(block_id) == self._checksums[block_id]
        if not is_intact:
            logger.warning(
                "a block of keys and values is not as an earlier engine wrote it, and is computed "
                "again; if that happens often, this machine's memory may be faulty"
            )
        return is_intact

    def record(self, blocks: Sequence[StoredBlock]) -> None:
        for block_id, digest, parent in blocks:
            self._tick += 1
            entry = _ENTRY.pack(digest, parent, self._tick, self.checksum(block_id))
            start = self._table + block_id * ENTRY_BYTES
            self._memory[start : start + ENTRY_BYTES] = entry + _check(block_id, entry)

    def erase(self, block_id: int) -> None:
        start = self._table + block_id * ENTRY_BYTES
        self._memory[start : start + ENTRY_BYTES] = bytes(ENTRY_BYTES)

    def checksum(self, block_id: int) -> int:
        memory, checksum = self._memory, 0
        for offset, num_layers, size in self._parts:
            start, layer_bytes = offset + block_id * size, size * self._num_blocks
            for _ in range(num_layers):
                checksum = crc32(memory[start : start + size], checksum)
                start += layer_bytes
        return checksum

    def _read(self) -> Iterator[_Entry]:
        for block_id in range(self._num_blocks):
            start = self._table + block_id * ENTRY_BYTES
            written = bytes(self._memory[start : start + ENTRY_BYTES])
            entry, check = written[: _ENTRY.size], written[_ENTRY.size :]
            if check == _check(block_id, entry):
                digest, parent, tick, checksum = _ENTRY.unpack(entry)
                yield _Entry(StoredBlock(block_id, digest, parent), tick, checksum)


def _check(block_id: int, entry: bytes) -> bytes:
    # An entry of zeros, as it is where nothing was ever written, has another check.
    return _CHECK.pack(crc32(entry, crc32(_CHECK.pack(block_id))))


def _in_order_of_eviction(entries: dict[bytes, _Entry]) -> list[StoredBlock]:
    """The least recently completed first, but each block before its parent, without which it cannot
    be found: a block counts as completed when the last of those after it was."""
    latest = {digest: entry.tick for digest, entry in entries.items()}
    # A block has a higher tick than its parent.
    for entry in sorted(entries.values(), key=attrgetter("tick"), reverse=True):
        _, digest, parent = entry.block
        if parent in latest:
            latest[parent] = max(latest[parent], latest[digest])
    in_order = sorted(entries.values(), key=lambda entry: (latest[entry.block.digest], -entry.tick))
    return [entry.block for entry in in_order]
