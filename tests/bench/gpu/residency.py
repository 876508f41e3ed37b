"""Which programs start early: an event model of launches, one after the other, on a device.

With programmatic dependent launch (PDL), programs of a launch get places as soon as all programs of
the launch before have started, wherever a multiprocessor has registers, shared memory and warps
left. There they wait until that launch has ended. A program that got its place early enough begins
`release` after that end; one that gets its place from a program that ends late begins `start` after
it. Programs are given places in their order, first on the emptiest multiprocessors.

Each multiprocessor works at its own pace: where fewer programs run than it holds of a full launch,
each is faster, as for bytes that they share. Of the waves of one launch only the first starts late;
what later ones wait for is hidden by those beside them. Left out: that an end is not the same
everywhere, and that a multiprocessor may divide its memory between L1 and shared only while it is
empty.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heappop, heappush

from tests.support.multiprocessor import WHOLE, Room

# Work that is left of a program, us, which is none.
_NOTHING = 1e-9
# Launches before one that say which places are free when it comes. All of them let the next start.
_WINDOW = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A launch. busy: the first programs, which have work; the others end when they begin. us: from
    the begin of all programs that have room to the end of the last."""

    programs: int
    busy: int
    room: Room
    us: float


@dataclass(frozen=True, slots=True)
class Started:
    """gap: us that a launch ended later than if it had begun when the one before ended. early: its
    programs that waited already by then."""

    gap: float
    early: int


@dataclass(slots=True)
class _Multiprocessor:
    """left: us of each running program's work, were it as fast as in a full launch."""

    free: Room = WHOLE
    left: list[float] = field(default_factory=list)
    speed: float = 1.0
    since: float = 0.0
    version: int = 0


class _Device:
    def __init__(self, grids: Sequence[Grid], release: float, start: float, num_sms: int) -> None:
        self._grids, self._release, self._start = grids, release, start
        self._sms = [_Multiprocessor() for _ in range(num_sms)]
        # us, a number that makes each different, then a multiprocessor and its version, and of a
        # program that begins, its number.
        self._events: list[tuple[float, int, int, int, int]] = []
        self._num_events = 0
        # The grid whose programs are next to get places, from when, and how many have them.
        self._queued, self._from, self._placed = 0, 0.0, 0
        # Of grids that cannot begin yet: each program's multiprocessor, and when it waits.
        self._waiting: list[list[tuple[int, float]]] = [[] for _ in grids]
        # The grid that runs, when its programs may begin, and when the one before ended.
        self._current, self._begin, self._ended = 0, 0.0, 0.0

    def run(self) -> list[Started]:
        found = list[Started]()
        for index, grid in enumerate(self._grids):
            before, self._current = self._ended, index
            self._begin = before + self._release * (index > 0)
            waiting = self._waiting[index]
            early = sum(ready <= self._begin for _, ready in waiting)
            for program, (sm, ready) in enumerate(waiting):
                self._push(max(ready, self._begin), sm, program=program)
            self._ended = self._run_current(grid, before)
            found.append(Started(self._ended - before - grid.us, early))
        return found

    def _run_current(self, grid: Grid, now: float) -> float:
        """When its last program ended."""
        busiest = -(-grid.busy // len(self._sms))
        full = min(WHOLE.times(grid.room), busiest)
        alone = max(2 * _NOTHING, grid.us * full / busiest) if busiest else 0.0
        running = grid.programs
        self._place(now)
        while running:
            now, freed, is_time = self._events[0][0], set[int](), False
            while self._events and self._events[0][0] <= now + _NOTHING:
                _, _, number, version, program = heappop(self._events)
                is_time |= number < 0
                if number < 0 or (program < 0 and version != self._sms[number].version):
                    continue
                num_ended = 1
                if program < grid.busy:  # else it finds nothing to do
                    num_ended = self._advance(number, now, full, alone if program >= 0 else 0.0)
                if num_ended:
                    sm = self._sms[number]
                    sm.free = sm.free.plus(grid.room, num_ended)
                    freed.add(number)
                running -= num_ended
            self._place(now, None if is_time else freed)
        return now

    def _advance(self, number: int, now: float, full: int, more: float) -> int:
        """How many programs of a multiprocessor have ended. more: us of one that begins."""
        sm = self._sms[number]
        left = [left - (now - sm.since) * sm.speed for left in sm.left]
        sm.left = [each for each in left if each > _NOTHING]
        num_ended = len(left) - len(sm.left)
        if more:
            sm.left.append(more)
        sm.since, sm.version = now, sm.version + 1
        if sm.left:
            sm.speed = max(1.0, full / len(sm.left))
            self._push(now + min(sm.left) / sm.speed, number, sm.version)
        return num_ended

    def _place(self, now: float, among: Collection[int] | None = None) -> None:
        """Gives places to programs whose turn it is, one on each multiprocessor and then again;
        among: these multiprocessors, by default all."""
        among = range(len(self._sms)) if among is None else among
        found = True
        while found and self._queued < len(self._grids) and now >= self._from - _NOTHING:
            found = False
            emptiest = sorted(among, key=lambda number: -self._sms[number].free.programs)
            for number in emptiest:
                room = self._grids[self._queued].room
                if self._sms[number].free.times(room):
                    found = True
                    if self._give(number, room, now):
                        break

    def _give(self, number: int, room: Room, now: float) -> bool:
        """Whether it was the last program of its launch."""
        sm = self._sms[number]
        sm.free = sm.free.plus(room, -1)
        if self._queued == self._current:
            # Its own programs' places, of a wave before, are full again at once.
            ready = now if now > self._ended + _NOTHING else now + self._start
            self._push(max(ready, self._begin), number, program=self._placed)
        else:
            self._waiting[self._queued].append((number, now + self._start))
        self._placed += 1
        if self._placed < self._grids[self._queued].programs:
            return False
        self._queued, self._placed, self._from = self._queued + 1, 0, now + self._start
        self._push(self._from, -1)
        return True

    def _push(self, at: float, sm: int, version: int = 0, program: int = -1) -> None:
        """sm: -1 where only the time matters."""
        self._num_events += 1
        heappush(self._events, (at, self._num_events, sm, version, program))


@lru_cache(maxsize=100_000)
def _last(grids: tuple[Grid, ...], release: float, start: float, num_sms: int) -> Started:
    return _Device(grids, release, start, num_sms).run()[-1]


def _shortened(grid: Grid, num_sms: int) -> Grid:
    """Without waves before the last three: they leave no trace."""
    wave = WHOLE.times(grid.room) * num_sms
    waves = grid.programs // wave - 3
    if grid.busy < grid.programs or waves <= 0:
        return grid
    programs = grid.programs - waves * wave
    us = grid.us * -(-programs // num_sms) / -(-grid.programs // num_sms)
    return replace(grid, programs=programs, busy=programs, us=us)


def started(
    grids: Sequence[Grid], *, release: float, start: float, num_sms: int = 132
) -> list[Started]:
    """Of launches that all let the next one start. Of the first, which finds an idle device, none
    of it is said."""
    grids = [_shortened(grid, num_sms) for grid in grids]
    windows = (tuple(grids[max(0, end - _WINDOW) : end]) for end in range(2, len(grids) + 1))
    return [Started(0.0, 0), *(_last(window, release, start, num_sms) for window in windows)]
