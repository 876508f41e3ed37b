"""`TorchGroup`: ranks that compute on GPUs, by torch.distributed.

By NCCL where each rank has a GPU of its own: its operations run in the stream's order, and a CUDA
graph may hold them. By gloo where ranks share one device, which NCCL refuses: through this
machine's memory, and the host waits in each. The ranks meet in memory that they inherit; nothing
listens where another machine could reach it.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from penstock.engine.ranks.board import Board
from penstock.engine.ranks.group import Doing, RankFailed

# For torch's own watchdog, which would end the process without a sentence. The limit of a step is
# `timeout_s`, and a process that ends is noticed by who started it.
_NO_LIMIT = timedelta(days=1)
_POLL_S = 5e-5
_LOOK_S = 0.01
_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Records of each operation would cost the host time. The second is the older name.
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    # Else every operation of every graph keeps memory for the buffers that it was captured with.
    "NCCL_GRAPH_REGISTER": "0",
    # All ranks are on this machine.
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}


class Event(Protocol):
    """A point in a device's stream."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...


def rendezvous_memory() -> int:
    """What the ranks meet in: a descriptor, which the other ranks must inherit."""
    return os.memfd_create("penstock-rendezvous")


class Rendezvous:
    """Where ranks wait for each other before they connect, which cannot be interrupted."""

    def __init__(self, descriptor: int, size: int) -> None:
        """descriptor: of `rendezvous_memory`; it stays open. size: of all ranks."""
        # One that the process opens again has a lock and a position of its own.
        self.store = FileStore(f"/proc/self/fd/{descriptor}", size)
        self.size = size

    def arrive(self, rank: int) -> None:
        self.store.set(f"rank {rank}", "here")

    def all_are_here(self) -> bool:
        return bool(self.store.check([f"rank {rank}" for rank in range(self.size)]))


class TorchGroup:
    """See `Group`. One for a process. Tensors are contiguous and on its device.

    With NCCL the operations return before they are done, sums are of the tensors' type in an order
    of NCCL's, equal on all ranks, and a rank that is missing is noticed in `wait_for`.
    """

    def __init__(
        self, rendezvous: Rendezvous, rank: int, device: torch.device, board: Board, *, alone: bool
    ) -> None:
        """alone: each rank has its device for itself. Waits until all ranks are connected. Raises
        RankFailed."""
        self.rank, self.size = rank, rendezvous.size
        self.doing = Doing()
        self._timeout_s = _NO_LIMIT.total_seconds()
        self._device = device
        self._board = board
        self._by_nccl = alone
        self._store = rendezvous.store
        self._num_agreed = 0
        self._ended: int | None = None
        self.closed = threading.Event()
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        with self._failures("connect"):
            dist.init_process_group(
                "nccl" if alone else "gloo",
                store=rendezvous.store,
                rank=rank,
                world_size=self.size,
                timeout=_NO_LIMIT,
                device_id=device if alone else None,
            )
        self._warm_up()

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph may hold its operations."""
        return self._by_nccl

    @property
    def timeout_s(self) -> float:
        """For how long this rank waits for the others."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._timeout_s = seconds
        if not self._by_nccl:  # whose watchdog would end the process
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))

    def at(self, step: int, phase: str) -> None:
        """Tells the other ranks where this one is. step: of the scheduler, or 0."""
        self.doing.step, self.doing.phase = step, phase
        self._board.write(self.rank, step, phase)

    def all_reduce(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous(), "a copy would be summed"
        self._call("all_reduce", tensor, dist.all_reduce)

    def broadcast(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous(), "a copy would be written"
        self._call("broadcast", tensor, lambda each: dist.broadcast(each, 0))

    def gather(self, tensor: Tensor) -> Tensor | None:
        # To all of them: where it is captured, that is better known to work than NCCL's gather.
        mine = tensor.cpu() if self._copies else tensor.contiguous()
        parts = mine.new_empty(self.size * len(mine), *mine.shape[1:])
        with self._failures("gather"):
            dist.all_gather_single(parts, mine)
        if self.rank:
            return None
        return parts.to(tensor.device).view(self.size, *tensor.shape)

    def barrier(self) -> None:
        """Waits for the device too."""
        self.all_reduce(one := torch.ones(1, dtype=torch.int32, device=self._device))
        if one.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self.wait_for(event)

    def least(self, numbers: list[int]) -> list[int]:
        """Of each number the least that any rank has. The host waits for all, not the device."""
        keys = [least_key(rank, self._num_agreed) for rank in range(self.size)]
        self._num_agreed += 1
        self._store.set(keys[self.rank], " ".join(map(str, numbers)))
        began_s = time.monotonic()
        while not self._store.check(keys):
            self._check(began_s)
            time.sleep(_LOOK_S)
        of_all = [map(int, self._store.get(key).split()) for key in keys]
        return [min(each) for each in zip(*of_all, strict=True)]

    def wait_for(self, event: Event) -> None:
        """Until the device has passed it. Raises RankFailed, also where the device waits for
        longer than `timeout_s`."""
        began_s = time.monotonic()
        while not event.query():
            self._check(began_s)
            time.sleep(_POLL_S)
        if self._ended is not None:  # what the device has then is not a result
            raise self._has_ended(self._ended)

    def _check(self, began_s: float) -> None:
        """began_s: when this rank began to wait."""
        if self._ended is not None:
            raise self._has_ended(self._ended)
        if time.monotonic() - began_s > self.timeout_s:
            raise self._late()

    def _late(self) -> RankFailed:
        places = [self._board.read(rank) for rank in range(self.size)]
        others = [rank for rank in range(self.size) if rank != self.rank]
        rank = min(others, key=lambda each: places[each].step)
        return RankFailed(
            f"rank {rank} did not come within {self.timeout_s:g} s: it is at {places[rank]}, and "
            f"rank {self.rank} waits at {places[self.rank]}",
            rank=rank,
        )

    def end(self, rank: int) -> None:
        """That rank has ended, so nobody waits for it any more. May be called in any thread."""
        self._ended = rank

    def abort(self) -> None:
        """Makes the device wait no more either. May be called in any thread."""
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.distributed_c10d._abort_process_group()

    def close(self) -> None:
        """Ends this rank's part in it."""
        self.closed.set()
        if self._by_nccl:
            self.abort()  # others may have ended, whom `destroy` would wait for
        else:
            dist.destroy_process_group()

    @property
    def _copies(self) -> bool:
        """gloo takes the tensors of a processor."""
        return not self._by_nccl and self._device.type == "cuda"

    def _warm_up(self) -> None:
        """NCCL connects the ranks in the first operation of a kind, which no graph may hold."""
        numbers = torch.zeros(self.size, device=self._device)
        self.broadcast(numbers)
        self.gather(numbers)
        self.barrier()

    def _call(self, name: str, tensor: Tensor, operation: Callable[[Tensor], object]) -> None:
        """In place."""
        with self._failures(name):
            if self._copies:
                copy = tensor.cpu()
                operation(copy)
                tensor.copy_(copy)
            else:
                operation(tensor)

    @contextmanager
    def _failures(self, name: str) -> Iterator[None]:
        """name: of an operation. What torch raises for it becomes RankFailed."""
        try:
            yield
        except RuntimeError as error:  # dist.DistBackendError is one
            if "out of memory" in str(error).lower():
                raise
            if self._ended is not None:
                raise self._has_ended(self._ended) from error
            why = str(error).strip().partition("\n")[0]
            if "timed out" in why.lower():
                raise self._late() from error
            raise RankFailed(
                f"rank {self.rank} lost the others in {self.doing} ({name}: {why})",
                rank=self.rank,
            ) from error

    def _has_ended(self, rank: int) -> RankFailed:
        return RankFailed(
            f"rank {rank} has ended while rank {self.rank} waited for it in {self.doing}", rank=rank
        )


def least_key(rank: int, number: int) -> str:
    """Where a rank writes its part of its number-th `TorchGroup.least`, in the rendezvous."""
    return f"{number} of rank {rank}"
