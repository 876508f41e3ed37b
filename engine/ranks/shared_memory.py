"""`SharedMemoryGroup`: ranks on one machine, in memory that they share (native/ranks/ranks.cpp)."""

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.ranks.group import Doing, RankFailed
from penstock.engine.ranks.layout import RankLayout

_DONE, _ENDED = 0, 1  # see Outcome in ranks.cpp
_ALL_REDUCE = {torch.float32: "float", torch.bfloat16: "bf16"}
_NS = 10**9
_PAGE = mmap.ALLOCATIONGRANULARITY


def shared_memory(num_bytes: int) -> int:
    """A descriptor, which the other ranks must inherit. The memory has no name in a file system,
    and is gone when the last of them has ended; zeros take none of it before they are written.
    Raises OSError."""
    descriptor = os.memfd_create("penstock-ranks")
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def group_bytes(library: ctypes.CDLL, size: int) -> int:
    """The memory of a group of so many ranks: whole pages."""
    library.penstock_ranks_bytes.restype = ctypes.c_int64
    num_bytes: int = library.penstock_ranks_bytes(ctypes.c_int64(size))
    return -(-num_bytes // _PAGE) * _PAGE


class SharedMemoryGroup:
    """See `Group`. Of tensors in this machine's memory, contiguous; sums are of float32 or
    bfloat16."""

    def __init__(
        self,
        library: ctypes.CDLL,
        descriptor: int,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        offset: int = 0,
        doing: Doing | None = None,
        layout: RankLayout | None = None,
        members: Sequence[int] = (),
    ) -> None:
        """library: of `native.library.load_ranks_library`. descriptor, offset: of the memory, of
        which it has `group_bytes`. timeout_s: for how long a rank waits for another. doing: of this
        process, where it is in several groups. layout: of all ranks, of which these are some;
        members: the number that each has among all."""
        self.rank, self.size = rank, size
        self.doing = doing or Doing()
        self.timeout_s = timeout_s
        self._layout = layout or RankLayout(size)
        self._members = list(members or range(size))
        for name in ("ranks_number", "ranks_missing", "ranks_stamp"):
            getattr(library, f"penstock_{name}").restype = ctypes.c_int64
        library.penstock_ranks_make.restype = ctypes.c_void_p
        self._library = library
        self._memory = mmap.mmap(descriptor, group_bytes(library, size), offset=offset)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        made = library.penstock_ranks_make(
            ctypes.c_void_p(address), ctypes.c_int64(rank), ctypes.c_int64(size)
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
        if outcome != _DONE:
            raise self.failed(name, outcome)

    @property
    def timeout_ns(self) -> int:
        return int(self.timeout_s * _NS)

    @property
    def all_reduce_lane(self) -> tuple[int | None, int | None]:
        """For C++: what a function of the type AllReduce (native/ranks/ranks.h) takes first, and
        such a function. Both are valid as long as this is."""
        function = self._library.penstock_all_reduce_lane
        return self._ranks.value, ctypes.cast(function, ctypes.c_void_p).value

    def failed(self, name: str, outcome: int) -> RankFailed:
        """name: of the collective that ended with this outcome of C++."""
        missing = self._library.penstock_ranks_missing(self._ranks)
        number = self._library.penstock_ranks_number(self._ranks)
        if outcome == _ENDED:
            rank, what = missing, "has ended"
        else:
            rank, what = self._members[missing], f"did not come within {self.timeout_s:g} s"
        last = ""
        if rank in self._members:
            of = ctypes.c_int64(self._members.index(rank))
            last = f"; its last was {self._library.penstock_ranks_stamp(self._ranks, of)}"
        me = self._layout.name_of(self._members[self.rank])
        return RankFailed(
            f"{self._layout.name_of(rank)} {what} while {me} waited for it in {self.doing} "
            f"({name}, collective {number}{last})",
            rank=rank,
        )
