"""`DiskTier`: blocks of keys and values in files, written and read by threads of their own.

The engine's thread asks and is answered from memory; it waits for no file. A block is copied out of
the pool while steps run, without a lock: the pool's block may be written to once it was withdrawn,
so a copy that was finished before that is whole, and another is thrown away. A block is written to
the pool only after its file was verified, and only while its load is not cancelled.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Protocol

from penstock.engine.memory.tiers.block_files import HEADER_BYTES, BlockFiles, Unreadable
from penstock.scheduler.cache.tier import Loaded, TierBlock
from penstock.scheduler.stats import PlaceStats, TierStats, plus

logger = logging.getLogger(__name__)

NUM_READERS = 4
# A block in use all the time is marked as used so often, at most.
_TOUCH_S = 60.0
# How often other servers' files are looked for.
_SCAN_S = 60.0
# After a write failed, as where the disk is full.
_WRITE_PAUSE_S = 30.0
# When the process is about to end, it waits so long for blocks to be written.
_FLUSH_S = 5.0
# Each new measurement is this share of the bandwidth; and each load that was not begun moves it as
# far back to what was measured at the start, so that a slow direction gets another chance.
_NEW_SHARE = 0.3
_RETURN_SHARE = 0.05
# To begin and end a load, whatever its size: threads, and the loop that looks for what has ended.
_LATENCY_S = 0.002

Task = Callable[[], None]


class TransferRate:
    """How long a load would take, by what is on its way in its direction and what others took. One
    thread at a time may change it."""

    def __init__(self, bytes_per_s: float) -> None:
        self._start_bytes_per_s = self.bytes_per_s = bytes_per_s
        self.open_bytes = 0
        """Loads that have begun and not ended have these."""

    def seconds(self, num_bytes: int) -> float:
        """For so many more, from now."""
        return _LATENCY_S + (self.open_bytes + num_bytes) / self.bytes_per_s

    def measure(self, num_bytes: int, seconds: float) -> None:
        measured = num_bytes / max(seconds, 1e-6)
        self.bytes_per_s += _NEW_SHARE * (measured - self.bytes_per_s)

    def decline(self) -> None:
        """A load was not begun, as it would have taken too long."""
        self.bytes_per_s += _RETURN_SHARE * (self._start_bytes_per_s - self.bytes_per_s)


class BlockMemory(Protocol):
    """The bytes of a pool's blocks. Threads may share it."""

    def num_bytes(self, group: int) -> int:
        """A block has so many."""
        ...

    def read(self, group: int, block_id: int) -> memoryview:
        """A copy."""
        ...

    def reach(self, group: int, block_id: int) -> None:
        """To be called by the engine's thread before `write`."""
        ...

    def write(self, group: int, block_id: int, content: memoryview) -> None: ...


@dataclass(slots=True, eq=False)
class _Load:
    """is_taken: it is being written to the pool, or has been; it cannot be cancelled."""

    block: TierBlock
    block_id: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_taken: bool = False
    is_cancelled: bool = False


class DiskTier:
    """See `penstock.scheduler.cache.tier.BlockTier`."""

    def __init__(
        self,
        files: BlockFiles,
        memory: BlockMemory,
        read_bytes_per_s: float,
        *,
        num_readers: int = NUM_READERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """read_bytes_per_s: as measured at the start. num_readers: threads that read, beside one
        that writes; 0 for no threads, where `work` does what they would."""
        self._files, self.key = files, files.key
        self._memory = memory
        self._clock = clock
        self._known: dict[TierBlock, float] = {}  # when it was last marked as used
        self._stores: dict[tuple[int, int], object] = {}  # of blocks that were not withdrawn
        self._loads: dict[TierBlock, _Load] = {}
        self._ended: SimpleQueue[Loaded] = SimpleQueue()
        self._writes: SimpleQueue[Task] = SimpleQueue()
        self._reads: SimpleQueue[Task] = SimpleQueue()
        self._write_after_s = 0.0
        self._total_bytes = 0
        self.rate = TransferRate(read_bytes_per_s)
        # Since when anything is being read, and the bytes of that.
        self._busy_since_s = 0.0
        self._busy_bytes = 0
        self._counts = PlaceStats()
        self._forgotten: set[TierBlock] = set()  # whose files may still be there
        self._lock = threading.Lock()  # of what is found, forgotten and counted
        self._last_read_s = 0.0
        self._scan()
        if num_readers:
            _run(self._writes, "kv-offload-write", self._look_around)
            for number in range(num_readers):
                _run(self._reads, f"kv-offload-read-{number}")

    def __contains__(self, block: TierBlock) -> bool:
        return block in self._known

    def store(self, block: TierBlock, block_id: int) -> None:
        now_s = self._clock()
        if (used_s := self._known.get(block)) is not None:
            if now_s - used_s > _TOUCH_S:
                self._known[block] = now_s
                self._writes.put(lambda: self._touch(block))
        elif now_s >= self._write_after_s and (block.group, block_id) not in self._stores:
            token = self._stores[block.group, block_id] = object()
            self._writes.put(lambda: self._store(block, block_id, token))

    def withdraw(self, group: int, block_id: int) -> None:
        if self._stores.pop((group, block_id), None) is not None:
            self._count(unwritten_blocks_total=1)

    def forget(self, block: TierBlock) -> None:
        with self._lock:
            self._forgotten.add(block)
            self._known.pop(block, None)
        # After a write of it that has begun.
        self._writes.put(lambda: self._forget(block))

    def load(self, block_ids: Mapping[TierBlock, int]) -> None:
        for block, block_id in block_ids.items():
            self._memory.reach(block.group, block_id)
            load = self._loads[block] = _Load(block, block_id)
            if not self.rate.open_bytes:
                self._busy_since_s, self._busy_bytes = self._clock(), 0
            self.rate.open_bytes += self._memory.num_bytes(block.group)
            self._reads.put(partial(self._load, load))

    def loaded(self) -> Iterable[Loaded]:
        while not self._ended.empty():
            ended = self._ended.get()
            self._end(ended.block, is_read=ended.is_intact)
            # A block that was forgotten meanwhile must not be found.
            yield ended._replace(is_intact=ended.is_intact and ended.block in self._known)

    def cancel(self, block: TierBlock) -> bool:
        load = self._loads[block]
        with load.lock:
            load.is_cancelled = not load.is_taken
        if load.is_cancelled:
            self._end(block, is_read=False)
        return load.is_cancelled

    def load_s(self, blocks: Sequence[TierBlock]) -> float:
        return self.rate.seconds(sum(self._memory.num_bytes(block.group) for block in blocks))

    def decline(self) -> None:
        self.rate.decline()

    def stats(self) -> TierStats:
        return TierStats(disk=self.place_stats())

    def place_stats(self) -> PlaceStats:
        return self._counts._replace(num_blocks=len(self._known), num_bytes=self._total_bytes)

    def work(self, most: int | None = None) -> None:
        """Does what the threads would have done by now, or have not begun: all, or so many tasks of
        each kind."""
        for queue in (self._reads, self._writes):
            for _ in count() if most is None else range(most):
                try:
                    task = queue.get_nowait()
                except Empty:
                    break
                task()

    def flush(self) -> None:
        is_done = threading.Event()
        self._writes.put(is_done.set)
        is_done.wait(_FLUSH_S)

    # Called by threads.

    def _store(self, block: TierBlock, block_id: int, token: object) -> None:
        where, started_s = (block.group, block_id), self._clock()
        if self._stores.get(where) is not token:
            return
        is_paused = started_s < self._write_after_s
        content = None if is_paused else self._memory.read(*where)
        # Withdrawn before this line, it may have been written to while it was copied.
        if self._stores.get(where) is not token:
            return
        self._stores.pop(where, None)
        if content is None:
            return
        try:
            self._files.write(block, content)
        except OSError as error:
            self._pause_writes(error)
            return
        self._total_bytes += HEADER_BYTES + len(content)
        with self._lock:
            if block not in self._forgotten:
                self._known[block] = self._clock()
        self._count(written_bytes_total=len(content), write_s_total=self._clock() - started_s)
        if self._total_bytes > self._files.limit_bytes:
            self._scan()

    def _pause_writes(self, error: OSError) -> None:
        self._write_after_s = self._clock() + _WRITE_PAUSE_S
        self._count(failed_writes_total=1)
        logger.warning(
            "a block of keys and values cannot be written to --kv-offload-dir, and for %.0f s none "
            "will be: %s",
            _WRITE_PAUSE_S,
            error.strerror or error,
        )

    def _touch(self, block: TierBlock) -> None:
        try:
            self._files.touch(block)
        except FileNotFoundError:
            self._known.pop(block, None)
        except OSError:
            return  # it only grows old

    def _forget(self, block: TierBlock) -> None:
        self._files.remove(block)
        with self._lock:
            self._forgotten.discard(block)

    def _load(self, load: _Load) -> None:
        if load.is_cancelled:
            return
        block, started_s = load.block, self._clock()
        content = None
        try:
            content = self._files.read(block, self._memory.num_bytes(block.group))
        except Unreadable as error:
            self._known.pop(block, None)
            self._files.remove(block)
            self._count(damaged_blocks_total=1)
            logger.log(
                # Another server that keeps the limit removes files too.
                logging.DEBUG if error.is_missing else logging.WARNING,
                "a file of --kv-offload-dir is %s; its block of keys and values is computed again",
                error,
            )
        except OSError as error:
            self._known.pop(block, None)
            logger.warning("a file of --kv-offload-dir cannot be read: %s", error.strerror or error)
        with load.lock:
            if load.is_cancelled:
                return
            load.is_taken = True
        if content is not None:
            self._memory.write(block.group, load.block_id, content)
            self._count(read_bytes_total=len(content), read_s_total=self._clock() - started_s)
        self._last_read_s = self._clock()
        self._ended.put(Loaded(block, content is not None))

    def _look_around(self) -> None:
        if self._clock() - self._scanned_s > _SCAN_S:
            self._scan()

    def _scan(self) -> None:
        """Learns what other servers have written and removed, and keeps the limit."""
        self._scanned_s = self._clock()
        try:
            self._total_bytes, num_removed = self._files.tidy()
            found = list(self._files.blocks())
        except OSError as error:
            logger.warning("--kv-offload-dir cannot be read: %s", error.strerror or error)
            return
        with self._lock:
            known = self._known
            self._known = {
                block: known.get(block, self._scanned_s)
                for block in found
                if block not in self._forgotten
            }
        if num_removed:
            self._count(removed_blocks_total=num_removed)

    # Called by both.

    def _end(self, block: TierBlock, *, is_read: bool) -> None:
        del self._loads[block]
        num_bytes = self._memory.num_bytes(block.group)
        self.rate.open_bytes -= num_bytes
        if is_read:
            self._busy_bytes += num_bytes
            self._count(hit_blocks_total=1)
        if not self.rate.open_bytes and self._busy_bytes:
            self.rate.measure(self._busy_bytes, self._last_read_s - self._busy_since_s)

    def _count(self, **more: float) -> None:
        with self._lock:
            self._counts = plus(self._counts, **more)


def _run(tasks: "SimpleQueue[Task]", name: str, in_between: Task | None = None) -> None:
    """In a thread of its own, for as long as the process lives."""

    def run() -> None:
        while True:
            if in_between is not None:
                in_between()
            try:
                task = tasks.get(timeout=_SCAN_S if in_between is not None else None)
            except Empty:
                continue
            try:
                task()
            except Exception:  # the next may succeed; a load that never ends is given up
                logger.exception("a block of keys and values was neither read nor written")

    threading.Thread(target=run, name=name, daemon=True).start()
