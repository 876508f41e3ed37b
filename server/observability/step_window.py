"""The engine's steps of the last ten seconds: for utilization, idle ratio and the line in the log.

Steps are added up by the second in which they ended. So a step costs a few additions, and reading
the window some thirty, however many steps it holds.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from penstock.engine.client import StepReport
from penstock.scheduler.stats import StepClass

# Long enough for steady values, short enough to follow the load.
WINDOW_S = 10


@dataclass(slots=True)
class Totals:
    """Sums over steps. model_bytes, model_flops, computed_s: see `StepReport`."""

    step_s: float = 0.0
    model_bytes: int = 0
    model_flops: int = 0
    computed_s: float = 0.0

    def add(self, part: "StepReport | Totals") -> None:
        self.step_s += part.step_s
        self.model_bytes += part.model_bytes
        self.model_flops += part.model_flops
        self.computed_s += part.computed_s or 0.0

    @property
    def bubble_ratio(self) -> float:
        """The share of the steps' time in which a stage computed nothing."""
        return max(0.0, 1 - self.computed_s / self.step_s) if self.step_s else 0.0

    @property
    def bytes_per_s(self) -> float:
        """While the steps ran; 0 if none ran."""
        return self.model_bytes / self.step_s if self.step_s else 0.0

    @property
    def flops_per_s(self) -> float:
        return self.model_flops / self.step_s if self.step_s else 0.0


@dataclass(slots=True)
class _Second:
    """totals: of the steps that ended in this second. busy_s: how much of the second a step ran."""

    number: int
    busy_s: float = 0.0
    totals: dict[StepClass, Totals] = field(
        default_factory=lambda: {kind: Totals() for kind in StepClass}
    )


class RecentSteps:
    """The steps of the window. Times are in time.monotonic(); steps are added in their order."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque()
        self._first_s = math.inf
        self._last_end_s = -math.inf

    def begin(self, now_s: float) -> None:
        """The engine is ready: time before this does not count as idle."""
        self._first_s = min(self._first_s, now_s)

    def add(self, report: StepReport, kind: StepClass) -> None:
        start_s, step_s = report.started_s, report.step_s
        end_s = start_s + step_s
        self._last_end_s = end_s
        if start_s < self._first_s:
            self._first_s = start_s
        number = int(end_s)
        if not self._seconds or self._seconds[-1].number < number:
            self._begin_seconds(start_s, number)
        second = self._seconds[-1]
        second.totals[kind].add(report)
        if start_s >= number:
            second.busy_s += step_s
        else:
            self._add_busy_time(start_s, end_s)

    def totals(self, now_s: float) -> dict[StepClass, Totals]:
        """By class, the sums over the steps that ended in the window."""
        sums = {kind: Totals() for kind in StepClass}
        for second in self._window(now_s):
            for kind, part in second.totals.items():
                sums[kind].add(part)
        return sums

    def idle_ratio(self, now_s: float, *, is_stepping: bool) -> float:
        """The share of the window in which no step ran. is_stepping: the engine has work, so a step
        has been running since the last one ended."""
        since_s = max(self._first_s, float(int(now_s) - WINDOW_S))
        if now_s <= since_s:
            return 1.0
        busy_s = sum(second.busy_s for second in self._window(now_s))
        if is_stepping:
            busy_s += max(0.0, now_s - max(self._last_end_s, since_s))
        return min(1.0, max(0.0, 1.0 - busy_s / (now_s - since_s)))

    def _window(self, now_s: float) -> list[_Second]:
        oldest = int(now_s) - WINDOW_S
        return [second for second in self._seconds if second.number >= oldest]

    def _begin_seconds(self, start_s: float, number: int) -> None:
        """Adds the missing seconds from the step's start to its end, and drops the old ones."""
        oldest = number - WINDOW_S
        first = max(int(start_s), oldest)
        if self._seconds:
            first = max(first, self._seconds[-1].number + 1)
        self._seconds.extend(_Second(n) for n in range(first, number + 1))
        while self._seconds[0].number < oldest:
            self._seconds.popleft()

    def _add_busy_time(self, start_s: float, end_s: float) -> None:
        """Splits a step that ran across the boundary of a second between the seconds."""
        for second in self._seconds:
            overlap_s = min(end_s, second.number + 1) - max(start_s, second.number)
            second.busy_s += max(0.0, overlap_s)
