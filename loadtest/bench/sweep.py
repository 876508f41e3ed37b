"""The highest request rate at which a server still meets its SLO: bracket it, then bisect.

Each rate is a separate replay, long enough for a meaningful share of good requests, with its own
seed, so that its prompts are not in the prefix cache from another rate. A replay that can no longer
pass is stopped at once.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.loadtest.bench.http_target import HttpTarget
from penstock.loadtest.bench.replay import replay
from penstock.loadtest.command_line import require
from penstock.loadtest.report.figures import Measurement
from penstock.loadtest.report.report import (
    ReportConfig,
    RequestResult,
    is_good,
    report_warnings,
    summarize,
)
from penstock.loadtest.workload.config import WorkloadConfig, cache_advice
from penstock.loadtest.workload.token_counter import TokenCounter
from penstock.loadtest.workload.workload import TimedRequest, make_requests

# Fewer cannot tell 99 % good from 97 %. To send them, a slow rate may take 3 times its seconds.
MIN_REQUESTS, MAX_STRETCH = 100, 3
# After this many rates that all passed, or all failed, the search stops without a limit.
MAX_DOUBLINGS, MAX_HALVINGS = 16, 6
# By then the server has aborted the requests of the last rate that were cancelled.
PAUSE_S = 0.5
# A rate should be sent for at least this many times the latency of a request.
MIN_ANSWERS_LONG = 3
Z_95 = 1.96  # standard deviations on each side that hold 95 % of a normal distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """min_ratio: share of good requests that a rate requires. precision: relative, of the limit.
    seconds: duration of each rate, or up to MAX_STRETCH times that to send MIN_REQUESTS."""

    goodput_ms: dict[str, float]
    start_rate: float = 1.0
    min_ratio: float = 0.99
    seconds: float = 20.0
    precision: float = 0.05

    def num_requests(self, rate: float) -> int:
        wanted = max(MIN_REQUESTS, math.ceil(rate * self.seconds))
        return max(1, min(wanted, math.ceil(rate * self.seconds * MAX_STRETCH)))

    def __post_init__(self) -> None:
        ratio, seconds, precision = self.min_ratio, self.seconds, self.precision
        require(0 < ratio <= 1, "--sweep-goodput-ratio", ratio, "in (0, 1]")
        require(0 < seconds < math.inf, "--sweep-seconds", seconds, "more than 0")
        require(0.001 <= precision < 1, "--sweep-precision", precision, "in [0.001, 1)")


@dataclass(slots=True)
class Bracket:
    """The range of the limit: at least `met` and below `missed`."""

    met_rates: list[float] = field(default_factory=list)
    missed: float | None = None

    @property
    def met(self) -> float | None:
        return max(self.met_rates, default=None)

    def record(self, rate: float, *, is_met: bool) -> None:
        """A miss overrides earlier passes at this rate and above."""
        if is_met:
            self.met_rates.append(rate)
        else:
            self.missed = rate
            self.met_rates = [met for met in self.met_rates if met < rate]

    def next_rate(self, start: float, precision: float) -> float | None:
        """None when the limit is known to this precision."""
        if self.met is None and self.missed is None:
            return start
        if self.missed is None:
            assert self.met is not None
            return self.met * 2 if self.met < start * 2**MAX_DOUBLINGS else None
        if self.met is None:
            return self.missed / 2 if self.missed > start / 2**MAX_HALVINGS else None
        if self.missed <= self.met * (1 + precision):
            return None
        return math.sqrt(self.met * self.missed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateResult(Measurement):
    """One rate of a sweep. num_planned: requests; a replay stopped early has sent fewer."""

    rate: float
    is_met: bool
    num_planned: int

    @property
    def num_good(self) -> int:
        ratio: float = self.summary["goodput_ratio"]
        return round(ratio * len(self.observed.results))


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """met, missed: the limit is between these rates; None if no replay met, or missed, the SLO."""

    rates: list[RateResult]
    met: float | None
    missed: float | None
    is_interrupted: bool

    @property
    def best(self) -> list[RateResult]:
        """The replays at the highest rate that met the SLO."""
        return [row for row in self.rates if row.rate == self.met]


async def sweep(
    target: HttpTarget,
    workload: WorkloadConfig,
    config: SweepConfig,
    report: ReportConfig,
    *,
    count: TokenCounter,
    shows_progress: bool,
    say: Callable[[str], None],
) -> SweepResult:
    """Replays one rate after another until the limit is known; Ctrl-C returns what is known."""
    results: list[RateResult] = []

    async def measure(rate: float) -> bool | None:
        number = len(results) + 1
        seed, num_requests = workload.seed + number, config.num_requests(rate)
        at_rate = replace(workload, request_rate=rate, seed=seed, num_prompts=num_requests)
        requests = make_requests(at_rate, count)
        result = await _measure(target, requests, rate, config, report, shows_progress)
        if result is None:
            return None
        results.append(result)
        num, word = len(result.observed.results), "meets" if result.is_met else "misses"
        say(
            f"rate {number}: {rate:.2f} req/s {word} the SLO "
            f"({result.num_good} of {num} requests good)"
        )
        advice = cache_advice(workload)
        for line in report_warnings(result.observed, has_due_times=True, cache_advice=advice):
            say(f"rate {number}: {line}")
        await asyncio.sleep(PAUSE_S)
        return result.is_met

    bracket, is_complete = await search(measure, config.start_rate, config.precision)
    return SweepResult(
        rates=results, met=bracket.met, missed=bracket.missed, is_interrupted=not is_complete
    )


async def search(
    measure: Callable[[float], Awaitable[bool | None]], start: float, precision: float
) -> tuple[Bracket, bool]:
    """The bracket of the limit, and whether it reached the precision: not if `measure` gave None.
    The result has been measured twice, so that it is not a rate that passed once by chance."""
    bracket, confirmed = Bracket(), None
    while True:
        rate = bracket.next_rate(start, precision)
        if rate is None:
            if bracket.met is None or confirmed == bracket.met:
                return bracket, True
            rate = confirmed = bracket.met
        is_met = await measure(rate)
        if is_met is None:
            return bracket, False
        bracket.record(rate, is_met=is_met)


async def _measure(
    target: HttpTarget,
    requests: list[TimedRequest],
    rate: float,
    config: SweepConfig,
    report: ReportConfig,
    shows_progress: bool,
) -> RateResult | None:
    """None if interrupted."""
    num_bad_allowed = math.floor(len(requests) * (1 - config.min_ratio) + 1e-9)
    num_bad = 0

    def judge(result: RequestResult) -> None:
        nonlocal num_bad
        if is_good(result, config.goodput_ms):
            return
        num_bad += 1
        if num_bad == num_bad_allowed + 1:
            task.cancel()

    task = asyncio.create_task(
        replay(target, requests, shows_progress=shows_progress, on_result=judge)
    )
    observed = await task
    is_met = num_bad <= num_bad_allowed
    if observed.is_interrupted and is_met:
        return None
    return RateResult(
        rate=rate,
        is_met=is_met,
        num_planned=len(requests),
        summary=summarize(observed, report) | {"request_rate": rate},
        observed=observed,
    )


def wilson_interval(num_good: int, num: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share. Source: Wilson 1927 (doi:10.2307/2276774)."""
    if not num:
        return 0.0, 1.0
    share, z2 = num_good / num, Z_95 * Z_95
    centre = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = Z_95 / (1 + z2 / num) * math.sqrt(share * (1 - share) / num + z2 / (4 * num * num))
    return max(0.0, centre - half), min(1.0, centre + half)


_COLUMNS = (
    ("req/s out", "request_throughput", 10, 2),
    ("tok/s", "output_throughput", 9, 0),
    ("TTFT p50", "median_ttft_ms", 10, 1),
    ("TPOT p50", "median_tpot_ms", 10, 2),
    ("E2EL p50", "median_e2el_ms", 10, 0),
)


def sweep_table(result: SweepResult) -> str:
    """A row per rate, ascending: latencies in ms, the share of good requests and its interval."""
    head = f"{'rate':>8} {'requests':>9} {'good':>7} {'95 % interval':>15}"
    head += "".join(f"{title:>{width + 1}}" for title, _, width, _ in _COLUMNS)
    lines = [f"{' Sweep ':=^{len(head) + 8}}", f"{head}  SLO"]
    lines += [_table_row(row) for row in sorted(result.rates, key=lambda row: row.rate)]
    return "\n".join([*lines, "=" * (len(head) + 8), conclusion(result)])


def _table_row(row: RateResult) -> str:
    num = len(row.observed.results)
    low, high = wilson_interval(row.num_good, num)
    line = f"{row.rate:>8.2f} {num:>9} {row.summary['goodput_ratio']:>7.1%}"
    line += f" {f'{low:.1%}-{high:.1%}':>15}"
    for _, key, width, digits in _COLUMNS:
        value = row.summary[key]
        line += f" {'-' if value is None else f'{value:.{digits}f}':>{width}}"
    return f"{line}  {'met' if row.is_met else 'missed'}"


def conclusion(result: SweepResult) -> str:
    """The result in a sentence, with its confidence interval."""
    unsure = "; interrupted before the limit was known more precisely" * result.is_interrupted
    if result.met is None:
        lowest = f"{result.missed:.2f} req/s" if result.missed is not None else "every rate"
        return f"no rate met the SLO: {lowest} missed it{unsure}"
    at = result.best
    num, num_good = sum(len(row.observed.results) for row in at), sum(row.num_good for row in at)
    low, high = wilson_interval(num_good, num)
    sure = f"({num_good} of {num} requests good there, 95 % interval {low:.1%} to {high:.1%})"
    if result.missed is None:
        found = f"at least {result.met:.2f} req/s meet the SLO, and no rate missed it"
    else:
        found = f"the highest rate that meets the SLO is {result.met:.2f} req/s; "
        found += f"{result.missed:.2f} missed it"
    return f"{found} {sure}{unsure}"


def caveats(result: SweepResult, workload: WorkloadConfig) -> list[str]:
    """Reasons why the result may be wrong, each with what to change."""
    lines = []
    latencies_ms = [row.summary["median_e2el_ms"] or 0.0 for row in result.best]
    durations_s = [row.num_planned / row.rate for row in result.best]
    # Batch and queue need the time of a few requests to fill up.
    if result.best and max(latencies_ms) / 1000 * MIN_ANSWERS_LONG > min(durations_s):
        lines.append(
            f"a request took {max(latencies_ms) / 1000:.1f} s and each rate was sent for "
            f"{min(durations_s):.0f} s, which may be too short to fill the server: raise "
            "--sweep-seconds"
        )
    if any(row.num_planned < MIN_REQUESTS for row in result.best):
        lines.append(
            f"fewer than {MIN_REQUESTS} requests were sent at {result.met:.2f} req/s, too few to "
            "distinguish shares near 100 %: raise --sweep-seconds"
        )
    if workload.dataset.has_texts:
        lines.append(
            "every rate sent prompts of the same file, which a prefix cache makes faster the "
            "second time: compare with the server's prefix cache off"
        )
    return lines


def sweep_summary(result: SweepResult, config: SweepConfig) -> dict[str, Any]:
    rates = [
        row.summary | {"slo_met": row.is_met, "num_asked": row.num_planned} for row in result.rates
    ]
    return {
        "max_request_rate": result.met,
        "missed_request_rate": result.missed,
        "is_interrupted": result.is_interrupted,
        "min_goodput_ratio": config.min_ratio,
        "sweep": rates,
    }
