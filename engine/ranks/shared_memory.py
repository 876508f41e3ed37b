"""`SharedMemoryGroup`: ranks on one machine, in memory that they share (native/ranks/ranks.cpp)."""

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.engine.ranks.group import Doing, RankFailed
from penstock.engine.ranks.layout import RankLayout

DONE, ENDED = 0, 1  # see Outcome in ranks.cpp and links.cpp
NS = 10**9
PAGE = mmap.ALLOCATIONGRANULARITY
_ALL_REDUCE = {torch.float32: "float", torch.bfloat16: "bf16"}


def shared_memory(num_bytes: int) -> int:
    """A descriptor, which the other ranks must inherit. The memory has no name in a file system,
    and is gone when the last of them has ended; zeros take none of it before they are written.
    Raises OSError."""
    descriptor = os.memfd_create("penstock-ranks")
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


def group_bytes(library: ctypes.CDLL, size: int) -> int:
    """The memory of a group of so many ranks: whole pages."""
    library.penstock_ranks_bytes.restype = ctypes.c_int64
    return whole_pages(library.penstock_ranks_bytes(ctypes.c_int64(size)))


@dataclass(slots=True)
class RankMemory:
    """The memory in which all ranks of a layout meet, as one of them has it.

    library: of `native.library.load_ranks_library`. descriptor: of `shared_memory`. timeout_s: for
    how long this rank waits for another, from now on. doing: what it does.
    """

    library: ctypes.CDLL
    descriptor: int
    layout: RankLayout
    rank: int
    timeout_s: float
    doing: Doing = field(default_factory=Doing)

    @property
    def timeout_ns(self) -> int:
        return int(self.timeout_s * NS)

    def failed(self, rank: int, outcome: int, where: str) -> RankFailed:
        """The error of waiting for that rank, by the outcome of C++."""
        names = self.layout.name_of
        what = "has ended" if outcome == ENDED else f"did not come within {self.timeout_s:g} s"
        return RankFailed(
            f"{names(rank)} {what} while {names(self.rank)} waited for it in {self.doing} "
            f"({where})",
            rank=rank,
        )


class SharedMemoryGroup:
    """See `Group`. Of tensors in this machine's memory, contiguous; sums are of float32 or
    bfloat16."""

    def __init__(self, memory: RankMemory, members: Sequence[int], offset: int = 0) -> None:
        """members: of all ranks those in it, this one too. offset: in the memory, of which it has
        `group_bytes`."""
        self.memory, self._members = memory, list(members)
        self.rank, self.size = members.index(memory.rank), len(members)
        self.doing = memory.doing
        self._library = library = memory.library
        for name in ("ranks_number", "ranks_missing", "ranks_stamp"):
            getattr(library, f"penstock_{name}").restype = ctypes.c_int64
        library.penstock_ranks_make.restype = ctypes.c_void_p
        num_bytes = group_bytes(library, self.size)
        self._mapped = mmap.mmap(memory.descriptor, num_bytes, offset=offset)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))
        made = library.penstock_ranks_make(
            ctypes.c_void_p(address), ctypes.c_int64(self.rank), ctypes.c_int64(self.size)
        )
        self._ranks = ctypes.c_void_p(made)
        weakref.finalize(self, library.penstock_ranks_free, self._ranks)

    def all_reduce(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous(), "a copy would be summed"
        self._call(
            "all_reduce",
            f"penstock_all_reduce_{_ALL_REDUCE[tensor.dtype]}",
            ctypes.c_void_p(tensor.data_ptr()),
            ctypes.c_int64(tensor.numel()),
        )

    def broadcast(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous(), "a copy would be written"
        self._call(
            "broadcast",
            "penstock_broadcast",
            ctypes.c_void_p(tensor.data_ptr()),
            ctypes.c_int64(tensor.nbytes),
        )

    def gather(self, tensor: Tensor) -> Tensor | None:
        tensor = tensor.contiguous()
        into = None
        if self.rank == 0:
            into = torch.empty(self.size, *tensor.shape, dtype=tensor.dtype)
        self._call(
            "gather",
            "penstock_gather",
            ctypes.c_void_p(tensor.data_ptr()),
            ctypes.c_int64(tensor.nbytes),
            ctypes.c_void_p(None if into is None else into.data_ptr()),
        )
        return into

    def barrier(self) -> None:
        self._call("barrier", "penstock_barrier")

    def end(self, rank: int) -> None:
        """Ends all waiting, as this rank has ended, of this group or of another. May be called in
        any thread."""
        self._library.penstock_ranks_end(self._ranks, ctypes.c_int64(rank))

    def _call(self, name: str, function: str, *arguments: object) -> None:
        deadline_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + self.timeout_ns
        outcome = getattr(self._library, function)(
            self._ranks, *arguments, ctypes.c_int64(deadline_ns)
        )
        if outcome != DONE:
            raise self.failed(name, outcome)

    @property
    def timeout_ns(self) -> int:
        return self.memory.timeout_ns

    @property
    def all_reduce_lane(self) -> tuple[int | None, int | None]:
        """For C++: what a function of the type AllReduce (native/ranks/ranks.h) takes first, and
        such a function. Both are valid as long as this is."""
        function = self._library.penstock_all_reduce_lane
        return self._ranks.value, ctypes.cast(function, ctypes.c_void_p).value

    def failed(self, name: str, outcome: int) -> RankFailed:
        """name: of the collective that ended with this outcome of C++."""
        missing = self._library.penstock_ranks_missing(self._ranks)
        where = f"{name}, collective {self._library.penstock_ranks_number(self._ranks)}"
        rank = missing if outcome == ENDED else self._members[missing]
        if rank in self._members:
            member = ctypes.c_int64(self._members.index(rank))
            where += f"; its last was {self._library.penstock_ranks_stamp(self._ranks, member)}"
        return self.memory.failed(rank, outcome, where)
