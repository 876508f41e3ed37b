"""Climbs the ladder of `tests.bench.gpu.rungs`, and chooses how all later parts launch kernels.

Each rung is a process of its own, so that a hang, a refusal or a lost device ends that rung alone.
Rungs of one wave run at once; if several of them fail, each is tried again alone, since one may
have taken the others with it.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.bench.gpu.processes import Ended, Log, Process, Row
from tests.bench.gpu.rungs import LAST, WAVES, Rung
from tests.bench.gpu.ways import Way, way_for

# A rung compiles, and its reference and its checks compute, on the host too.
_CORES_PER_RUNG = 4


@dataclass(frozen=True, slots=True)
class Climb:
    """simulated: by the name of a rung, a kind of `tests.bench.gpu.simulated`, or for all of them
    by the name `all`. note, fail: get what a rung found, and why one failed."""

    tiny: bool
    simulated: dict[str, str]
    note: Callable[[Row], None]
    fail: Callable[[str, str], None]
    log: Log
    # Of the rungs' limits, for simulations.
    patience: float = 1.0

    def way(self, ends_s: float) -> Way:
        """Tries all rungs, and returns the fastest way that they allow.

        ends_s: of time.monotonic(); a rung that cannot start before it has not passed.
        """
        passed: set[str] = set()
        way = Way()
        for wave in WAVES:
            if wave[0].name in LAST:
                way = way_for(passed)
            passed |= self._try_wave(wave, way, ends_s)
        return way

    def _try_wave(self, wave: Sequence[Rung], way: Way, ends_s: float) -> set[str]:
        """The names of those that passed."""
        at_once = max(1, min(len(wave), (os.cpu_count() or 1) // _CORES_PER_RUNG))
        problems: dict[str, str | None] = {}
        for first in range(0, len(wave), at_once):
            problems |= self._try(wave[first : first + at_once], way, ends_s)
        failed = [rung for rung in wave if problems[rung.name]]
        if at_once > 1 and len(failed) > 1:
            for rung in failed:
                problems |= self._try([rung], way, ends_s)
        for name, problem in problems.items():
            if problem:
                self.fail(name, problem)
        return {name for name, problem in problems.items() if problem is None}

    def _try(self, rungs: Sequence[Rung], way: Way, ends_s: float) -> dict[str, str | None]:
        """What is wrong with each, run at once."""
        problems: dict[str, str | None] = {}

        def run(rung: Rung) -> None:
            problems[rung.name] = self._problem(rung, way, ends_s)

        threads = [threading.Thread(target=run, args=(rung,)) for rung in rungs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {rung.name: problems[rung.name] for rung in rungs}

    def _problem(self, rung: Rung, way: Way, ends_s: float) -> str | None:
        limit_s = min(rung.limit_s * self.patience, ends_s - time.monotonic())
        if limit_s <= 0:
            return "the probe's time was used up before it could start"
        rows: list[Row] = []

        def note(row: Row) -> None:
            rows.append(row)
            self.note(row)

        # The other rungs choose for themselves.
        environment = way.environment if rung.name in LAST else {}
        process = Process(
            self._command(rung, way), note, self.log, limit_s=limit_s, environment=environment
        )
        return _verdict(process.wait(), rows)

    def _command(self, rung: Rung, way: Way) -> list[str]:
        kind = self.simulated.get(rung.name, self.simulated.get("all"))
        flags = way.flags if rung.name in LAST else []
        if kind:
            return [sys.executable, "-m", "tests.bench.gpu.simulated", kind, rung.name, *flags]
        tiny = ["--tiny"] if self.tiny else []
        return [sys.executable, "-m", "tests.bench.gpu.rung", rung.name, *tiny, *flags]


def _verdict(ended: Ended, rows: Sequence[Row]) -> str | None:
    if ended.problem:
        return ended.problem
    if not rows:
        return "it ended without a result"
    wrong = [row for row in rows if not row.get("is_right")]
    return f"it computes something else: {wrong[0]}" if wrong else None
