"""`KVMemory`: memory for a pool of keys and values that outlives the engine which computes them.

The server makes it (`make_descriptor`) and passes it down to one engine after the other. It has no
name in any file system, so it ends with the last process that holds it, whatever ends that.

    header | for each group of layers: entries of its journal | its pool's tensors

Each tensor is on huge pages of its own.
The header says for which model and in which layout the rest was written: `identity`. Anything else
is not read but made anew.
"""

import contextlib
import os
import secrets
import struct
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from penstock.engine.memory import huge_pages
from penstock.engine.memory.huge_pages import PAGE_BYTES, GrowingHugePages, SharedMapping
from penstock.engine.memory.pool.journal import ENTRY_BYTES, Journal, Part
from penstock.scheduler.cache.prefix import KEY_BYTES

_MAGIC = b"penstock KV 2\n\0\0"
# Room for the sizes of so many groups: those that are not there have no block.
_MAX_GROUPS = 16
_HEADER = struct.Struct(f"<16s32s{KEY_BYTES}s{_MAX_GROUPS}Q")
_CHECK = struct.Struct("<I")
_HEADER_BYTES = 4096
# After each tensor: vectors are read that begin in the pool and end behind it.
SPARE_BYTES = 4096


def make_descriptor() -> int | None:
    """Memory without a content; None where the system has none that outlives a process, or none on
    huge pages: without these, each step would be slower.

    Several may be made. It is for `os.close` once it is not needed.
    """
    if not huge_pages.are_possible():
        return None
    with contextlib.suppress(OSError):  # not all containers allow it
        return os.memfd_create("penstock-kv", os.MFD_CLOEXEC)
    return None


def identity_of(model: Path, *what: object) -> bytes:
    """Equal for the same files in the same place, and what has the same repr."""
    files = sorted(model.iterdir()) if model.is_dir() else [model]
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    found = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return blake2b(repr((str(model), found, what)).encode(), digest_size=32).digest()


class MappedPool(NamedTuple):
    """A group of layers has it. tensors: the bytes of each, with `SPARE_BYTES` after it."""

    tensors: list[memoryview]
    journal: Journal
    pages: GrowingHugePages


class KVMemory:
    """To be mapped once, after the pools' sizes are known."""

    def __init__(self, descriptor: int, identity: bytes, key: bytes | None = None) -> None:
        """identity: 32 bytes, which differ where the same block would have other bytes, or mean
        other tokens. key: of the digests, where the blocks are elsewhere too."""
        self._descriptor = descriptor
        self._identity = identity
        self._key = key or secrets.token_bytes(KEY_BYTES)
        self.num_blocks: tuple[int, ...] | None = None
        """The pools have these that an earlier engine left; None where there is none of this
        identity."""
        header = os.pread(descriptor, _HEADER.size + _CHECK.size, 0)
        if len(header) == _HEADER.size + _CHECK.size and _check(header) == header[_HEADER.size :]:
            magic, of, found, *num_blocks = _HEADER.unpack(header[: _HEADER.size])
            if (magic, of) == (_MAGIC, identity) and key in (None, found):
                self._key, self.num_blocks = found, tuple(filter(None, num_blocks))
        if self.num_blocks is None:
            os.ftruncate(descriptor, 0)  # frees it before anybody asks how much memory is free

    def map(self, pools: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> list[MappedPool]:
        """The pools of keys and values, whose tensors are (num_layers, num_blocks, ...).

        pools: num_blocks of each, and of each of its tensors num_layers and the bytes of one block
        in one layer. Pools that were left stay if they have as many blocks.
        """
        assert len(pools) <= _MAX_GROUPS
        num_blocks = tuple(num for num, _ in pools)
        tables, parts_of = [], []
        end = _HEADER_BYTES
        for num, shapes in pools:
            tables.append(end)
            parts = []
            end += num * ENTRY_BYTES
            for num_layers, block_bytes in shapes:
                start = -(-end // PAGE_BYTES) * PAGE_BYTES
                parts.append(Part(start, num_layers, block_bytes))
                end = start + num_layers * num * block_bytes + SPARE_BYTES
            parts_of.append(parts)
        if num_blocks != self.num_blocks:
            os.ftruncate(self._descriptor, 0)
        # Pages that nobody has touched take no memory.
        os.ftruncate(self._descriptor, end)
        mapping = SharedMapping(self._descriptor, end)
        if num_blocks != self.num_blocks:
            sizes = (*num_blocks, *(0,) * (_MAX_GROUPS - len(pools)))
            header = _HEADER.pack(_MAGIC, self._identity, self._key, *sizes)
            mapping.memory[: _HEADER.size + _CHECK.size] = header + _check(header)
        return [
            _mapped_pool(mapping, table, num, parts, self._key)
            for table, num, parts in zip(tables, num_blocks, parts_of, strict=True)
        ]


def _mapped_pool(
    mapping: SharedMapping, table: int, num_blocks: int, parts: Sequence[Part], key: bytes
) -> MappedPool:
    memory = mapping.memory
    tensors = [
        memory[part.offset : part.offset + size + SPARE_BYTES]
        for part in parts
        for size in [part.num_layers * num_blocks * part.block_bytes]
    ]
    layers = [
        (part.offset + layer * num_blocks * part.block_bytes, part.block_bytes)
        for part in parts
        for layer in range(part.num_layers)
    ]
    journal = Journal(memory, table, num_blocks, parts, key)
    return MappedPool(tensors, journal, GrowingHugePages(mapping, layers, num_blocks))


def _check(header: bytes) -> bytes:
    return _CHECK.pack(crc32(header[: _HEADER.size]))
