"""A device that runs ahead, without a device: streams of work that go on in any order that their
events allow, and blocks that move between the pool of a `ScriptedExecutor` and slots."""

from collections import deque
from collections.abc import Callable, Sequence
from zlib import crc32

from penstock.engine.memory.tiers.disk_tier import BlockMemory, DiskTier
from penstock.engine.memory.tiers.host_pieces import HostPieces
from penstock.engine.memory.tiers.host_tier import HostTier, Move
from penstock.scheduler.types import SampledTokens, ScheduledBatch
from tests.support.scheduling import Driver

Task = Callable[[], None]


class Event:
    def __init__(self, stream: "Stream") -> None:
        self.is_done = False
        self._stream = stream

    def finish(self) -> None:
        """Lets its stream, and what that waits for, go on until it is done; and nothing else."""
        while not self.is_done:
            self._stream.go_on(wanted=True)


class Stream:
    def __init__(self) -> None:
        self._tasks: deque[Task | Event] = deque()

    def put(self, task: Task) -> None:
        self._tasks.append(task)

    def wait_event(self, event: Event) -> None:
        self._tasks.append(event)

    def record(self) -> Event:
        event = Event(self)
        self.put(lambda: setattr(event, "is_done", True))
        return event

    def go_on(self, *, wanted: bool = False) -> None:
        """One task, if there is one and what it waits for is done. wanted: it will be."""
        if not self._tasks:
            return
        task = self._tasks[0]
        if isinstance(task, Event):
            if wanted:
                task.finish()
            if not task.is_done:
                return
            self._tasks.popleft()
            return
        self._tasks.popleft()
        task()


class Moving:
    """See `penstock.engine.memory.tiers.host_tier.Transfer`."""

    seconds = 1e-3

    def __init__(self) -> None:
        self.has_read: Event | None = None
        self.ended: Event | None = None
        self.checksums: list[int] = []

    def wait(self) -> list[int]:
        assert self.ended
        self.ended.finish()
        return self.checksums


class SimulatedMover:
    """See `penstock.engine.memory.tiers.host_tier.BlockMover`."""

    def __init__(self, memory: BlockMemory, pieces: HostPieces, most_blocks: int) -> None:
        self.memory, self._pieces = memory, pieces
        self._most_blocks = most_blocks
        self.gathers: list[tuple[int, list[Move]]] = []  # group and moves of each
        self.steps, self.outward, self.inward = Stream(), Stream(), Stream()

    def most_blocks(self, group: int) -> int:
        return self._most_blocks

    def fence(self) -> Event:
        return self.steps.record()

    def hold(self, gathering: Moving) -> None:
        assert gathering.has_read
        self.steps.wait_event(gathering.has_read)

    def gather(self, group: int, moves: Sequence[Move]) -> Moving:
        moving, staged = Moving(), list[bytes]()
        self.gathers.append((group, [*moves]))

        def read(move: Move) -> Task:
            return lambda: staged.append(bytes(self.memory.read(group, move.block_id)))

        def write(row: int, move: Move) -> Task:
            def run() -> None:
                self.slot(group, move.slot)[:] = staged[row]
                moving.checksums.append(crc32(staged[row], move.seed & 0xFFFFFFFF))

            return run

        for move in moves:
            self.outward.put(read(move))
        moving.has_read = self.outward.record()
        for row, move in enumerate(moves):
            self.outward.put(write(row, move))
        moving.ended = self.outward.record()
        return moving

    def scatter(
        self, group: int, moves: Sequence[Move], checksums: Sequence[int], fences: Sequence[Event]
    ) -> Moving:
        moving = Moving()

        def copy(move: Move, expected: int) -> Task:
            def run() -> None:
                content = bytes(self.slot(group, move.slot))
                moving.checksums.append(crc32(content, move.seed & 0xFFFFFFFF))
                if moving.checksums[-1] == expected:
                    self.memory.write(group, move.block_id, memoryview(content))

            return run

        for fence in fences:
            self.inward.wait_event(fence)
        for move, expected in zip(moves, checksums, strict=True):
            self.inward.put(copy(move, expected))
        moving.ended = self.inward.record()
        return moving

    def slot(self, group: int, slot: int) -> memoryview:
        [run] = self._pieces.runs(group, [slot])
        return run[0].numpy().data


class LaunchedStep:
    """`PendingTokens` of a step of the simulated device."""

    def __init__(self, stream: Stream, run: Callable[[], SampledTokens]) -> None:
        self._found: list[SampledTokens] = []
        stream.put(lambda: self._found.append(run()))
        self._event = stream.record()

    def wait(self) -> SampledTokens:
        self._event.finish()
        return self._found[0]


class AheadDriver(Driver):
    """A `Driver` whose device runs up to two steps behind, with a `HostTier`."""

    mover: SimulatedMover
    host: HostTier
    pieces: HostPieces
    disk: DiskTier | None

    def launch(self) -> ScheduledBatch | None:
        batch = self.scheduler.schedule(self.now)
        if batch:
            self.batches.append(batch)
            executor = self.executor
            step = LaunchedStep(self.mover.steps, lambda: executor.execute(batch).wait())
            self.launched.append(step)
        return batch

    def step(self) -> ScheduledBatch | None:
        batch = self.launch()
        if self.launched and (not batch or len(self.launched) > 1):
            self.collect()
        return batch
