"""`KeptMemory`: memory for a pool of keys and values that outlives the engine which computes them.

The server makes it (`make_descriptor`) and passes it down to one engine after the other. It has no
name in any file system, so it ends with the last process that holds it, whatever ends that.

    header | entries of the journal | the pool's tensors, each on huge pages of its own

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
from zlib import crc32

from penstock.engine.memory import huge_pages
from penstock.engine.memory.huge_pages import PAGE_BYTES, GrowingHugePages, SharedMapping
from penstock.engine.memory.journal import ENTRY_BYTES, Journal, Part
from penstock.scheduler.prefix import KEY_BYTES

_MAGIC = b"penstock KV 1\n\0\0"
_HEADER = struct.Struct(f"<16s32s{KEY_BYTES}sQ")
_CHECK = struct.Struct("<I")
_HEADER_BYTES = 4096
# After each tensor: vectors are read that begin in the pool and end behind it.
SPARE_BYTES = 4096


def make_descriptor() -> int | None:
    """Of memory without a content; None where the system has none that outlives a process, or none
    on huge pages: without these, each step would be slower.

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


class KeptMemory:
    """To be mapped once, after the pool's size is known."""

    def __init__(self, descriptor: int, identity: bytes) -> None:
        """identity: 32 bytes, which differ where the same block would have other bytes, or mean
        other tokens."""
        self._descriptor = descriptor
        self._identity = identity
        self._key = secrets.token_bytes(KEY_BYTES)
        self.num_blocks: int | None = None
        """Of the pool that an earlier engine left; None where there is none of this identity."""
        header = os.pread(descriptor, _HEADER.size + _CHECK.size, 0)
        if len(header) == _HEADER.size + _CHECK.size and _check(header) == header[_HEADER.size :]:
            magic, of, key, num_blocks = _HEADER.unpack(header[: _HEADER.size])
            if (magic, of) == (_MAGIC, identity):
                self._key, self.num_blocks = key, num_blocks
        if self.num_blocks is None:
            os.ftruncate(descriptor, 0)  # frees it before anybody asks how much memory is free

    def map(
        self, num_blocks: int, shapes: Sequence[tuple[int, int]]
    ) -> tuple[list[memoryview], Journal, GrowingHugePages]:
        """The bytes of tensors (num_layers, num_blocks, ...), each with `SPARE_BYTES` after it, the
        journal of their blocks, and their pages.

        shapes: of each tensor, num_layers and the bytes of one block in one layer. A pool that was
        left is kept if it has num_blocks.
        """
        parts = []
        end = _HEADER_BYTES + num_blocks * ENTRY_BYTES
        for num_layers, block_bytes in shapes:
            start = -(-end // PAGE_BYTES) * PAGE_BYTES
            parts.append(Part(start, num_layers, block_bytes))
            end = start + num_layers * num_blocks * block_bytes + SPARE_BYTES
        if num_blocks != self.num_blocks:
            os.ftruncate(self._descriptor, 0)
        # Pages that nobody has touched take no memory.
        os.ftruncate(self._descriptor, end)
        mapping = SharedMapping(self._descriptor, end)
        memory = mapping.memory
        if num_blocks != self.num_blocks:
            header = _HEADER.pack(_MAGIC, self._identity, self._key, num_blocks)
            memory[: _HEADER.size + _CHECK.size] = header + _check(header)
        journal = Journal(memory, _HEADER_BYTES, num_blocks, parts, self._key)
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
        return tensors, journal, GrowingHugePages(mapping, layers, num_blocks)


def _check(header: bytes) -> bytes:
    return _CHECK.pack(crc32(header[: _HEADER.size]))
