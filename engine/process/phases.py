"""The phases of the engine's start: what is done now, how far it is, and how long each took.

It knows neither what a phase does nor who shows it: a phase is logged here when it begins and when
it ends, and reported to a function in between.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

logger = logging.getLogger(__name__)

# Often enough for a bar that moves; a model of many small matrices would report thousands of times.
_REPORT_INTERVAL_S = 0.1


class LoadProgress(msgspec.Struct, tag=True, frozen=True):
    """Engine to server: the phase of the start, and how far it is.

    num_done of total, in `unit`: bytes, or what is counted. total None: nothing is counted. text:
    the same in words, where numbers do not say all.
    """

    phase: str
    num_done: int = 0
    total: int | None = None
    unit: str = "bytes"
    text: str = ""


class Phases:
    """Reports and times each phase of a start. One phase at a time, of one thread; other threads
    may `advance` it."""

    def __init__(self, report: Callable[[LoadProgress], None] = lambda _: None) -> None:
        """report: is called by one thread at a time, whichever advances the phase."""
        self.seconds: dict[str, float] = {}  # of the phases that have ended, the same ones added
        self.current = ""  # the last that began
        self._report = report
        self._lock = threading.Lock()
        self._progress = LoadProgress("")
        self._reported_s = 0.0

    @contextmanager
    def timed(
        self, phase: str, what: str = "", *, total: int | None = None, unit: str = "bytes"
    ) -> Iterator[None]:
        """what: for the log, what the phase does. total: how many times it is to be advanced by
        one, or the sum of what it is to be advanced by."""
        self.current = phase
        logger.info("%s: %s", phase, what or "begins")
        with self._lock:
            self._progress = LoadProgress(phase, 0, total, unit)
            self._send()
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        logger.info("%s: %.2f s", phase, seconds)

    def advance(self, amount: int = 1) -> None:
        with self._lock:
            before = self._progress
            num_done = before.num_done + amount
            self._progress = LoadProgress(before.phase, num_done, before.total, before.unit)
            is_due = time.monotonic() - self._reported_s >= _REPORT_INTERVAL_S
            if is_due or num_done == before.total:
                self._send()

    def _send(self) -> None:
        self._reported_s = time.monotonic()
        self._report(self._progress)
