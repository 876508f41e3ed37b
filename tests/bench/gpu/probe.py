"""Climbs the ladder of `tests.bench.gpu.rungs`, and chooses how all later parts launch kernels.

Each rung is a process of its own, so that a hang, a refusal or a lost device ends that rung alone.
Rungs of one wave run at once; if several of them fail, each is tried again alone, since one may
have taken the others with it. One whose time was up has found nothing wrong, and may only have
compiled for too long: it is tried again alone, for twice the time.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.bench.gpu.processes import Ended, Log, Process, Row
from tests.bench.gpu.rungs import LAST, MODEL_KERNELS, RUNGS, WAVES, Rung
from tests.bench.gpu.ways import Way, way_for

_FIRST_MODEL = next(index for index, rung in enumerate(RUNGS) if rung.name == "model")
_OF_MODELS = {rung.name for rung in RUNGS[_FIRST_MODEL:]}


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
        way, blame = Way(), ""
        for wave in WAVES:
            if wave[0].name in LAST:
                way = way_for(passed)
            if wave[0].name in _OF_MODELS:
                blame = _blame(passed)
            passed |= self._try_wave(wave, way, ends_s, blame)
        return way

    def _try_wave(self, wave: Sequence[Rung], way: Way, ends_s: float, blame: str) -> set[str]:
        """The names of those that passed. blame: is added to what others failed by."""
        at_once = max(1, min(len(wave), (os.cpu_count() or 1) // wave[0].cores))
        found: dict[str, Ended] = {}
        for first in range(0, len(wave), at_once):
            found |= self._try(wave[first : first + at_once], way, ends_s)
        failed = [rung for rung in wave if found[rung.name].problem]
        have_company = at_once > 1 and len(failed) > 1
        for rung in failed:
            timed_out = found[rung.name].timed_out
            if have_company or timed_out:
                found |= self._try([rung], way, ends_s, times=2 if timed_out else 1)
        for name, ended in found.items():
            if ended.problem:
                line, *rest = ended.problem.splitlines()
                self.fail(name, "\n".join([line + blame, *rest]))
        return {name for name, ended in found.items() if not ended.problem}

    def _try(
        self, rungs: Sequence[Rung], way: Way, ends_s: float, times: int = 1
    ) -> dict[str, Ended]:
        """How each ended, run at once. times: of its limit."""
        found: dict[str, Ended] = {}

        def run(rung: Rung) -> None:
            found[rung.name] = self._run(rung, way, ends_s, times)

        threads = [threading.Thread(target=run, args=(rung,)) for rung in rungs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {rung.name: found[rung.name] for rung in rungs}

    def _run(self, rung: Rung, way: Way, ends_s: float, times: int) -> Ended:
        limit_s = min(times * rung.limit_s * self.patience, ends_s - time.monotonic())
        if limit_s <= 0:
            return Ended("the probe's time was used up before it could start", 0.0)
        rows: list[Row] = []

        def note(row: Row) -> None:
            rows.append(row)
            self.note(row)

        # The other rungs choose for themselves.
        environment = way.environment if rung.name in LAST else {}
        process = Process(
            self._command(rung, way), note, self.log, limit_s=limit_s, environment=environment
        )
        ended = process.wait()
        return ended if ended.problem else Ended(_wrong(rows), ended.seconds)

    def _command(self, rung: Rung, way: Way) -> list[str]:
        kind = self.simulated.get(rung.name, self.simulated.get("all"))
        flags = way.flags if rung.name in LAST else []
        if kind:
            return [sys.executable, "-m", "tests.bench.gpu.simulated", kind, rung.name, *flags]
        tiny = ["--tiny"] if self.tiny else []
        return [sys.executable, "-m", "tests.bench.gpu.rung", rung.name, *tiny, *flags]


def _blame(passed: set[str]) -> str:
    """What the rungs of single kernels say of a model that fails."""
    failed = [name for name in MODEL_KERNELS if name not in passed]
    if not failed:
        return " (each of its kernels was right alone)"
    return f" (of its kernels, {', '.join(failed)} failed alone)"


def _wrong(rows: Sequence[Row]) -> str | None:
    """What the rows of a rung that came to its end say against it."""
    if not rows:
        return "it ended without a result"
    wrong = [row for row in rows if not row.get("is_right")]
    return f"it computes something else: {wrong[0]}" if wrong else None
