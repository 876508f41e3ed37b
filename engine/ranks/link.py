"""`Link`: what one rank sends to another of the next stage, through memory that they share
(native/ranks/links.cpp)."""

import ctypes
import mmap
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.ranks.shared_memory import DONE, NS, PAGE, RankMemory, whole_pages

_SENT, _TAKEN = 0, 1  # see penstock_link_wait
# A message begins with its step, and the seconds that were computed for it.
_HEAD_BYTES = 64


@dataclass(frozen=True, slots=True)
class LinkSize:
    """So many messages may be under way, of at most so many bytes each."""

    num_messages: int
    message_bytes: int

    @property
    def slot_bytes(self) -> int:
        return whole_pages(_HEAD_BYTES + self.message_bytes)

    @property
    def num_bytes(self) -> int:
        """The memory of a link, which takes none before it is written. Zeros at first."""
        return PAGE + self.num_messages * self.slot_bytes


class Link:
    """One side of it: either that which calls `room` and `send`, or that which calls `receive` and
    `taken`, in turns. Messages are of tensors in this machine's memory."""

    def __init__(self, memory: RankMemory, other: int, size: LinkSize, offset: int) -> None:
        """other: the rank at its other side. offset: in the memory, of which a link has
        `size.num_bytes`."""
        memory.library.penstock_link_wait.restype = ctypes.c_int64
        self.shared, self._library, self._other = memory, memory.library, other
        self._size = size
        self._memory = mmap.mmap(memory.descriptor, size.num_bytes, offset=offset)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._number = 0  # of messages sent, or taken, by this side
        self.waited_s = 0.0
        """For how long the last `room` or `receive` waited."""

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Where the next message is to be written. Raises RankFailed."""
        self._wait(_TAKEN, self._number + 1 - self._size.num_messages)
        return self._message(shape, dtype)

    def send(self, step: int, computed_s: float) -> None:
        """Sends the message in `room`. computed_s: by this stage and those before it."""
        head = self._head()
        head[0], head[1] = step, computed_s
        self._count(_SENT)

    def receive(self, step: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next message, which is of this step; it stays until `taken`. Raises RankFailed."""
        self._wait(_SENT, self._number + 1)
        sent = int(self._head()[0])
        assert sent == step, f"the stage before is in step {sent}, and this one in step {step}"
        return self._message(shape, dtype)

    @property
    def computed_s(self) -> float:
        """The seconds that the message of `receive` came with."""
        return float(self._head()[1])

    def taken(self) -> None:
        """Its memory may be written again."""
        self._count(_TAKEN)

    def end(self, rank: int) -> None:
        """Ends the waiting for the other side, as that rank has ended. May be called in any
        thread."""
        self._library.penstock_link_end(self._address)

    @property
    def _address(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._bytes.data_ptr())

    def _slot(self) -> Tensor:
        first = PAGE + self._number % self._size.num_messages * self._size.slot_bytes
        return self._bytes[first : first + self._size.slot_bytes]

    def _head(self) -> Tensor:
        return self._slot()[:_HEAD_BYTES].view(torch.float64)

    def _message(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        assert num_bytes <= self._size.message_bytes, (shape, dtype, self._size)
        return self._slot()[_HEAD_BYTES : _HEAD_BYTES + num_bytes].view(dtype).view(shape)

    def _count(self, which: int) -> None:
        self._number += 1
        self._library.penstock_link_count(self._address, ctypes.c_int64(which))

    def _wait(self, which: int, number: int) -> None:
        began_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        outcome = self._library.penstock_link_wait(
            self._address,
            ctypes.c_int64(which),
            ctypes.c_uint32(number & 0xFFFFFFFF),
            ctypes.c_int64(began_ns + self.shared.timeout_ns),
        )
        self.waited_s = (time.clock_gettime_ns(time.CLOCK_MONOTONIC) - began_ns) / NS
        if outcome != DONE:
            awaited = "the states before it" if which == _SENT else "room for its states"
            where = f"{awaited}, message {self._number + 1}"
            raise self.shared.failed(self._other, outcome, where)
