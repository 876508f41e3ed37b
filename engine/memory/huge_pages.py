"""Shared memory on huge pages.

Linux gives shared memory small pages unless an administrator says otherwise (`shmem_enabled` under
/sys/kernel/mm/transparent_hugepage), and with these a thread that reads keys and values through a
block table gets two thirds of the bandwidth. Since 6.1 a process may ask for huge ones
range by range: MADV_COLLAPSE.
"""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterable
from functools import cache

PAGE_BYTES = 2 * 2**20
_POPULATE, _COLLAPSE = 23, 25  # MADV_POPULATE_WRITE and MADV_COLLAPSE, which mmap does not name
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000


class SharedMapping:
    """The first `size` bytes of a descriptor, at an address that huge pages can have. Raises
    OSError where it cannot be mapped."""

    def __init__(self, descriptor: int, size: int) -> None:
        whole = -(-size // PAGE_BYTES) * PAGE_BYTES
        # Addresses to choose from; the descriptor's memory takes the place of most.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._reserved = mmap.mmap(-1, whole + PAGE_BYTES, flags=flags)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._reserved))
        self._start = -address % PAGE_BYTES
        access = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED | _MAP_FIXED
        mapped = _mmap()(address + self._start, size, access, flags, descriptor, 0)
        if mapped != address + self._start:
            raise OSError(ctypes.get_errno(), "memory cannot be mapped")
        self.memory = memoryview(self._reserved)[self._start : self._start + size]

    def make_huge(self, page: int) -> None:
        """The page'th PAGE_BYTES, whatever they hold. It takes half a millisecond, once. Raises
        OSError where the system has no huge page left, or no such call."""
        start = self._start + page * PAGE_BYTES
        # A range without any page is refused. Writing to it would race with another process.
        self._reserved.madvise(_POPULATE, start, mmap.PAGESIZE)
        self._reserved.madvise(_COLLAPSE, start, PAGE_BYTES)


@cache
def are_possible() -> bool:
    """Whether this system makes huge pages of shared memory when it is asked."""
    if not hasattr(os, "memfd_create"):
        return False
    try:
        descriptor = os.memfd_create("penstock-probe", os.MFD_CLOEXEC)
    except OSError:  # not all containers allow it
        return False
    try:
        os.ftruncate(descriptor, PAGE_BYTES)
        SharedMapping(descriptor, PAGE_BYTES).make_huge(0)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


class GrowingHugePages:
    """Makes the pages of a pool huge as its blocks are used, so that unused ones take no memory.
    One thread uses it."""

    def __init__(
        self, mapping: SharedMapping, layers: Iterable[tuple[int, int]], blocks: int
    ) -> None:
        """layers: of each layer of each tensor, where it begins, and the bytes of a block.
        blocks: of the pool."""
        self._mapping = mapping
        self._layers = list(layers)
        self._num_blocks = blocks
        self._made: set[int] = set()
        self._covered = 0

    def reach(self, block: int) -> None:
        """Covers this block and those before it."""
        if block < self._covered:
            return
        reached: list[int] = []
        for start, block_bytes in self._layers:
            last = (start + (block + 1) * block_bytes - 1) // PAGE_BYTES
            for page in range((start + self._covered * block_bytes) // PAGE_BYTES, last + 1):
                if page not in self._made and (page + 1) * PAGE_BYTES <= len(self._mapping.memory):
                    self._made.add(page)
                    with contextlib.suppress(OSError):  # no huge page is left: it stays small
                        self._mapping.make_huge(page)
            reached.append(((last + 1) * PAGE_BYTES - start) // block_bytes)
        self._covered = max(block + 1, min([self._num_blocks, *reached]))


@cache
def _mmap() -> Callable[..., int | None]:
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    ]
    return call
