"""`PoolMover`: blocks of a GPU's pools, and recurrent states, to pinned memory of the host and
back, beside its steps.

A gather runs on one stream and a scatter on another: kernels between the pool and a staging buffer
of the GPU, where each block is one piece, and copies between that and the slots, one for all that
are next to each other. The engine's thread launches steps on a third stream. Between these:

- A gather needs no event before it: the steps that wrote to its blocks have completed.
- `hold` lets the steps' stream wait for the gather's kernels, not for its copies.
- `fence` records how far the steps' stream was launched, and a scatter waits for that: those steps
  may still use the blocks that it writes to.
- A step that reads a loaded block is launched after the host has seen its scatter's end.

One gather and one scatter are on their way at a time, so that a staging buffer has one use.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from penstock.engine.kernels.blocks import add_checksums, gather_blocks, scatter_blocks
from penstock.engine.memory.host import to_device
from penstock.engine.memory.pool.kv_pool import KVPool, KVPools
from penstock.engine.memory.pool.state_pool import StatePool
from penstock.engine.memory.tiers.host_pieces import HostPieces
from penstock.engine.memory.tiers.host_tier import Move

# For each direction: some milliseconds of a fast link, so that launches do not count.
STAGING_BYTES = 128 * 2**20
_MEASURED_TWICE = 2


class PoolTransfer:
    """See `penstock.engine.memory.tiers.host_tier.Transfer`."""

    def __init__(self, stream: "torch.cuda.Stream | None") -> None:
        """To be made where it begins."""
        self._started_s = time.perf_counter()
        self._checksums: Tensor | None = None
        self.seconds = 0.0
        self.has_read: Any = None
        """Event: nothing of it reads the pool any more."""
        self._start = self._end = None
        if stream is not None:
            self._start, self._end = _event(timed=True), _event(timed=True, sleeps=True)
            self._start.record(stream)

    def end(self, checksums: Tensor) -> None:
        """All of it has been launched."""
        self._checksums = torch.empty_like(
            checksums, device="cpu", pin_memory=self._end is not None
        )
        self._checksums.copy_(checksums, non_blocking=True)
        if self._end is not None:
            self._end.record()
        else:
            self.seconds = time.perf_counter() - self._started_s

    def wait(self) -> list[int]:
        if self._start is not None and self._end is not None:
            self._end.synchronize()
            self.seconds = self._start.elapsed_time(self._end) / 1e3
        assert self._checksums is not None
        found: list[int] = self._checksums.tolist()
        return found


class PoolMover:
    """See `BlockMover`. Where the pool is the processor's, as for
    Triton's interpreter, everything has ended when a method returns."""

    def __init__(self, pools: KVPools, staging_bytes: int, device: torch.device) -> None:
        """staging_bytes: of each direction, at least of one block."""
        self._device = device
        self._parts = [words_of(pool) for pool in pools.all_groups]
        self.piece_bytes = [piece_bytes(pool) for pool in pools.all_groups]
        self._pieces: HostPieces | None = None
        size = max(staging_bytes, *self.piece_bytes)
        self._staging_bytes = size
        self._outward, self._inward = (
            torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)
        )
        self._out_stream, self._in_stream = _stream(device), _stream(device)

    def use(self, pieces: HostPieces) -> None:
        """The memory of the slots, before anything is moved."""
        self._pieces = pieces

    def most_blocks(self, group: int) -> int:
        return self._staging_bytes // self.piece_bytes[group]

    def fence(self) -> Any:
        if self._in_stream is None:
            return None
        event = _event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def hold(self, gathering: PoolTransfer) -> None:
        if gathering.has_read is not None:
            torch.cuda.current_stream(self._device).wait_event(gathering.has_read)

    @torch.inference_mode()
    def gather(self, group: int, moves: Sequence[Move]) -> PoolTransfer:
        with _on(self._out_stream):
            transfer = PoolTransfer(self._out_stream)
            block_ids, checksums = self._upload(moves)
            staged = self._staged(self._outward, group, len(moves))
            start = 0
            for words in self._parts[group]:
                gather_blocks(block_ids, words, start, staged.view(torch.int32), checksums)
                start += words.shape[0] * words.shape[2]
            if self._out_stream is not None:
                transfer.has_read = _event()
                transfer.has_read.record(self._out_stream)
            for slots, rows in self._runs(group, moves, staged):
                slots.copy_(rows, non_blocking=True)
            transfer.end(checksums)
        return transfer

    @torch.inference_mode()
    def scatter(
        self, group: int, moves: Sequence[Move], checksums: Sequence[int], fences: Sequence[Any]
    ) -> PoolTransfer:
        with _on(self._in_stream):
            if self._in_stream is not None:
                for fence in dict.fromkeys(fences):
                    self._in_stream.wait_event(fence)
            transfer = PoolTransfer(self._in_stream)
            block_ids, found = self._upload(moves)
            expected = to_device(checksums, torch.int64, self._device)
            staged = self._staged(self._inward, group, len(moves))
            for slots, rows in self._runs(group, moves, staged):
                rows.copy_(slots, non_blocking=True)
            words_of_pieces = staged.view(torch.int32)
            add_checksums(words_of_pieces, found)
            start = 0
            for words in self._parts[group]:
                scatter_blocks(block_ids, words, start, words_of_pieces, found, expected)
                start += words.shape[0] * words.shape[2]
            transfer.end(found)
        return transfer

    def warm_up(self) -> None:
        """Moves a block of each group to the host and back, before blocks and slots are anybody's.
        Else the first store would compile kernels, while the engine's thread waits for the lock."""
        moves = [Move(0, 0, 0)]
        for group in range(len(self._parts)):
            checksums = self.gather(group, moves).wait()
            found = self.scatter(group, moves, checksums, ()).wait()
            assert found == checksums, f"a block of group {group} did not come back as it was"

    def measure(self) -> tuple[float, float]:
        """Bytes per second to the host and to the device, of the copies alone, which bound the
        rest. The slots' contents, which are nobody's yet, change."""
        assert self._pieces
        count = min(self.most_blocks(0), self._pieces.num_grown[0])
        moves = [Move(0, slot, 0) for slot in range(count)]
        staged = self._staged(self._outward, 0, count)
        rates = []
        for stream, is_outward in ((self._out_stream, True), (self._in_stream, False)):
            with _on(stream), torch.inference_mode():
                for _ in range(_MEASURED_TWICE):  # the first touches the memory
                    transfer = PoolTransfer(stream)
                    for slots, rows in self._runs(0, moves, staged):
                        if is_outward:
                            slots.copy_(rows, non_blocking=True)
                        else:
                            rows.copy_(slots, non_blocking=True)
                    transfer.end(torch.zeros(1, dtype=torch.int64, device=self._device))
                    transfer.wait()
            rates.append(count * self.piece_bytes[0] / max(transfer.seconds, 1e-9))
        return rates[0], rates[1]

    def _upload(self, moves: Sequence[Move]) -> tuple[Tensor, Tensor]:
        """The blocks' numbers, and the checksums to add to."""
        block_ids = to_device([move.block_id for move in moves], torch.int32, self._device)
        return block_ids, to_device([move.seed for move in moves], torch.int64, self._device)

    def _staged(self, staging: Tensor, group: int, count: int) -> Tensor:
        size = self.piece_bytes[group]
        return staging[: count * size].view(count, size)

    def _runs(
        self, group: int, moves: Sequence[Move], staged: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Groups slots that are next to each other, with their rows of the staging buffer."""
        assert self._pieces
        runs = self._pieces.runs(group, [move.slot for move in moves])
        rows = torch.split(staged, [len(run) for run in runs])
        return list(zip(runs, rows, strict=True))


def pin(memory: Tensor) -> None:
    """In place, for as long as the process lives. Raises RuntimeError."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def piece_bytes(pool: KVPool | StatePool) -> int:
    return sum(4 * words.shape[0] * words.shape[2] for words in words_of(pool))


def words_of(pool: KVPool | StatePool) -> list[Tensor]:
    """Returns a view of each tensor of a pool: (layers, blocks, n) int32, of the same memory."""
    return [tensor.flatten(2).view(torch.int32) for pair in pool.pairs() for tensor in pair]


def _stream(device: torch.device) -> "torch.cuda.Stream | None":
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _on(stream: "torch.cuda.Stream | None") -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _event(*, timed: bool = False, sleeps: bool = False) -> Any:
    """sleeps: a thread that waits for it leaves its core to others."""
    return torch.cuda.Event(enable_timing=timed, blocking=sleeps)  # type: ignore[no-untyped-call]
