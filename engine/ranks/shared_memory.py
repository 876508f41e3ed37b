"""`SharedMemoryGroup`: ranks on one machine, through memory that they share (native/ranks.cpp)."""

import ctypes
import mmap
import os
import time
import weakref

import torch
from torch import Tensor

from penstock.engine.ranks.group import Doing, RankFailed

_DONE, _ENDED = 0, 1  # see Outcome in ranks.cpp
_ALL_REDUCE = {torch.float32: "float", torch.bfloat16: "bf16"}
_NS = 10**9
MAX_RANKS = 16  # see ranks.cpp


def shared_memory(library: ctypes.CDLL, size: int) -> int:
    """Memory for a group of so many ranks: a descriptor, which the other ranks must inherit. It has
    no name in a file system, and is gone when the last of them has ended. Raises OSError."""
    num_bytes = library.penstock_ranks_bytes(ctypes.c_int64(size))
    descriptor = os.memfd_create("penstock-ranks")
    os.ftruncate(descriptor, num_bytes)
    return descriptor


class SharedMemoryGroup:
    """See `Group`. Of tensors in this machine's memory, contiguous; sums are of float32 or
    bfloat16."""

    def __init__(
        self, library: ctypes.CDLL, descriptor: int, rank: int, size: int, *, timeout_s: float
    ) -> None:
        """library: of `native.library.load_ranks_library`. descriptor: of `shared_memory`.
        timeout_s: for how long a rank waits for another."""
        self.rank, self.size = rank, size
        self.doing = Doing()
        self.timeout_s = timeout_s
        for name in ("ranks_bytes", "ranks_number", "ranks_missing", "ranks_stamp"):
            getattr(library, f"penstock_{name}").restype = ctypes.c_int64
        library.penstock_ranks_make.restype = ctypes.c_void_p
        self._library = library
        self._memory = mmap.mmap(descriptor, 0)
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
        """Ends the waiting of all for a rank that has ended. May be called in any thread."""
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
        """For C++: what a function of the type AllReduce (native/ranks.h) takes first, and such a
        function. Both are valid as long as this is."""
        function = self._library.penstock_all_reduce_lane
        return self._ranks.value, ctypes.cast(function, ctypes.c_void_p).value

    def failed(self, name: str, outcome: int) -> RankFailed:
        """name: of the collective that ended with this outcome of C++."""
        missing = self._library.penstock_ranks_missing(self._ranks)
        stamp = self._library.penstock_ranks_stamp(self._ranks, ctypes.c_int64(missing))
        number = self._library.penstock_ranks_number(self._ranks)
        what = "has ended" if outcome == _ENDED else f"did not come within {self.timeout_s:g} s"
        return RankFailed(
            f"rank {missing} {what} while rank {self.rank} waited for it in {self.doing} "
            f"({name}, collective {number}; its last was {stamp})",
            rank=missing,
        )
