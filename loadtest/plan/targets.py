"""`Targets` of a plan, and the judge that ends a simulation which cannot meet them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from penstock.loadtest.report.report import Replay, RequestResult, percentile

PERCENT = 99.0


@dataclass(frozen=True, slots=True)
class Targets:
    """limits_ms: how high the 99th percentile may be, by the metric's name in `--goodput`."""

    limits_ms: dict[str, float]

    def are_met(self, observed: Replay) -> bool:
        """A request that failed is slower than any limit."""
        if observed.is_interrupted or not observed.results:
            return False
        return all(
            self.percentile_ms(observed, metric) <= limit
            for metric, limit in self.limits_ms.items()
        )

    @staticmethod
    def percentile_ms(observed: Replay, metric: str, percent: float = PERCENT) -> float:
        """Infinite where so many requests failed."""
        values = sorted(seconds_of(result, metric) for result in observed.results)
        if not values:
            return math.inf
        seconds = percentile(values, percent)
        if math.isnan(seconds):  # between two ranks, one of which is infinite
            seconds = values[math.floor((len(values) - 1) * percent / 100)]
        return seconds * 1e3


def seconds_of(result: RequestResult, metric: str) -> float:
    """The metric of a request; infinite for one that failed."""
    if result.error is not None:
        return math.inf
    match metric:
        case "ttft":
            return result.ttft_s
        case "tpot":
            return result.tpot_s or 0.0
        case _:
            return result.latency_s


class TargetJudge:
    """Ends a simulation once more requests are too slow than a percentile leaves out."""

    def __init__(self, targets: Targets, num_requests: int) -> None:
        self._limits_s = {metric: limit / 1e3 for metric, limit in targets.limits_ms.items()}
        # The sorted values up to the percentile's rank must be within the limit.
        self._num_allowed = num_requests - 1 - math.floor((num_requests - 1) * PERCENT / 100)
        self._num_late = dict.fromkeys(targets.limits_ms, 0)

    def on_end(self, result: RequestResult) -> None:
        for metric, limit_s in self._limits_s.items():
            self._num_late[metric] += seconds_of(result, metric) > limit_s

    def is_over(self, open_results: Iterable[RequestResult], now_s: float) -> bool:
        """Open requests count as soon as they are late, whatever becomes of them."""
        late = dict(self._num_late)
        ttft_s, e2el_s = (self._limits_s.get(metric, math.inf) for metric in ("ttft", "e2el"))
        for result in open_results:
            arrived = result.arrivals_s
            waited_s = (arrived[0] if arrived else now_s) - result.start_s
            if waited_s > ttft_s:
                late["ttft"] += 1
            if now_s - result.start_s > e2el_s:
                late["e2el"] += 1
        return any(num > self._num_allowed for num in late.values())


def mean_tpot_s(observed: Replay) -> float | None:
    """Over requests with more than one token; None where there is none."""
    values = [tpot for result in observed.completed if (tpot := result.tpot_s) is not None]
    return fmean(values) if values else None
