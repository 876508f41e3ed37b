"""The figures of the report as data: lines and a timeline. `html` and `plots` draw them.

Times of a replay count from when its first request was due.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.loadtest.report.report import (
    LATENCIES,
    METRIC_TITLES,
    Replay,
    RequestResult,
    Summary,
    concurrency,
    metric_values,
    percentile,
)

NUM_CDF_POINTS = 200
NUM_TIME_BINS = 120
# A bin narrower than the gaps between arrivals would show the gaps and not the rate.
MIN_BIN_S = 0.05
MAX_TIMELINE_ROWS = 100
# Shown wherever a figure is about a distribution.
PERCENTILES = (50, 90, 95, 99)
# The phases of a request that its client can distinguish.
UNSENT, FIRST_TOKEN, DECODE = "waiting to be sent", "queue and prefill", "decode"
FAILED = "failed"  # the whole of a failed request, once it was sent
PARTS = (UNSENT, FIRST_TOKEN, DECODE, FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    summary: Summary
    observed: Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    has_marks: bool = False  # each point is a separate measurement
    has_line: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point with a name, such as p99."""

    name: str
    x: float
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    slug: str
    title: str
    x_label: str
    y_label: str
    series: list[Series]
    marks: list[Mark] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    part: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One row per request, in order of arrival."""

    slug: str
    title: str
    x_label: str
    rows: list[list[Span]]


@dataclass(frozen=True, slots=True)
class Value:
    """The median of repeated runs, and their range; all three are the value of a single run."""

    middle: float
    low: float
    high: float
    num: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Groups of bars, one bar of a group for each of `names`; None where there is no value."""

    title: str
    x_label: str
    names: list[str]
    groups: list[tuple[str, list[Value | None]]]


Figure: TypeAlias = Lines | Timeline


def figures(shown: Measurement, rates: Sequence[Measurement]) -> list[Figure]:
    """Figures of the sweep, if any, then of one replay. Empty ones are left out."""
    drawn: list[Figure] = []
    if rates:
        drawn += [_against_throughput(rates, metric) for metric in ("ttft", "tpot", "e2el")]
    done = shown.observed.completed
    drawn += [_cdf(done, metric) for metric in LATENCIES]
    drawn += [_tokens_over_time(shown.observed), _in_flight_over_time(shown.observed)]
    drawn.append(_timeline(shown.observed))
    return [figure for figure in drawn if _has_data(figure)]


def _has_data(figure: Figure) -> bool:
    if isinstance(figure, Timeline):
        return bool(figure.rows)
    return any(any(series.ys) for series in figure.series)


def _against_throughput(rates: Sequence[Measurement], metric: str) -> Lines:
    """In order of the rate, so that the line bends back where more load gives less throughput. One
    point per rate: its last complete run. Runs that were stopped early are not on the line."""
    short, title = METRIC_TITLES[metric]
    in_order = sorted(rates, key=lambda run: float(run.summary["request_rate"]))
    whole = {
        run.summary["request_rate"]: run for run in in_order if not run.observed.is_interrupted
    }
    points = _points(list(whole.values()), metric)
    stopped = _points([run for run in in_order if run.observed.is_interrupted], metric)

    def drawn(
        name: str, points: list[tuple[float, ...]], column: int, *, has_line: bool = True
    ) -> Series:
        xs, ys = [point[0] for point in points], [point[column] for point in points]
        return Series(name=name, xs=xs, ys=ys, has_marks=True, has_line=has_line)

    return Lines(
        slug=f"{metric}-against-throughput",
        title=f"{title} against throughput",
        x_label="output tokens/s",
        y_label=f"{short}, ms",
        series=[
            *(drawn(f"p{percent}", points, n) for n, percent in enumerate(PERCENTILES, start=1)),
            drawn("p99 of rates stopped early", stopped, -1, has_line=False),
        ],
    )


def _points(runs: list[Measurement], metric: str) -> list[tuple[float, ...]]:
    """Throughput, and each percentile in ms, of each run that has a complete response."""
    points = []
    for run in runs:
        if values := sorted(metric_values(run.observed.completed)[metric]):
            figures_ms = [percentile(values, percent) * 1000 for percent in PERCENTILES]
            points.append((run.summary["output_throughput"], *figures_ms))
    return points


def _cdf(done: list[RequestResult], metric: str) -> Lines:
    short, title = METRIC_TITLES[metric]
    values = sorted(metric_values(done)[metric])
    shares = [index / NUM_CDF_POINTS for index in range(NUM_CDF_POINTS + 1)] if values else []
    return Lines(
        slug=f"{metric}-cdf",
        title=f"{title}: distribution",
        x_label=f"{short}, ms",
        y_label="share of gaps" if metric == "itl" else "share of requests",
        series=[
            Series(
                name=short,
                xs=[percentile(values, share * 100) * 1000 for share in shares],
                ys=shares,
            )
        ],
        marks=[
            Mark(name=f"p{percent}", x=percentile(values, percent) * 1000, y=percent / 100)
            for percent in (PERCENTILES if values else ())
        ],
    )


def over_time(slug: str, title: str, y_label: str, series: list[Series]) -> Lines:
    return Lines(slug=slug, title=title, x_label="seconds", y_label=y_label, series=series)


def _start_s(observed: Replay) -> float:
    return min((result.scheduled_s for result in observed.results), default=0.0)


def _bins(observed: Replay) -> tuple[float, list[float]]:
    """The width of a bin in seconds, and the middle of each."""
    num = min(NUM_TIME_BINS, max(1, int(observed.duration_s / MIN_BIN_S)))
    width = observed.duration_s / num
    return width, [(index + 0.5) * width for index in range(num)]


def _tokens_over_time(observed: Replay) -> Lines:
    start_s, (width, middles) = _start_s(observed), _bins(observed)
    tokens = [0.0] * len(middles)
    for result in observed.completed:
        weight = result.num_output_tokens / len(result.arrivals_s)
        for arrival_s in result.arrivals_s:
            index = min(int((arrival_s - start_s) / width), len(tokens) - 1)
            tokens[index] += weight / width
    drawn = Series(name="output tokens/s", xs=middles, ys=tokens, has_marks=len(middles) == 1)
    return over_time("tokens-over-time", "Output tokens over time", "tokens/s", [drawn])


def _in_flight_over_time(observed: Replay) -> Lines:
    _, middles = _bins(observed)
    times_s, nums = concurrency(observed.results, _start_s(observed))
    counts = [float(nums[bisect_right(times_s, middle)]) for middle in middles]
    drawn = Series(name="in flight", xs=middles, ys=counts, has_marks=len(middles) == 1)
    return over_time("in-flight-over-time", "Requests in flight over time", "requests", [drawn])


def _timeline(observed: Replay) -> Timeline:
    start_s = _start_s(observed)
    results = sorted(observed.results, key=lambda result: result.scheduled_s)
    step = -(-len(results) // MAX_TIMELINE_ROWS) or 1
    every = "each request" if step == 1 else f"one in {step} requests"
    return Timeline(
        slug="timeline",
        title=f"Timeline of {every}, in order of arrival",
        x_label="seconds",
        rows=[_spans(result, start_s) for result in results[::step]],
    )


def _spans(result: RequestResult, start_s: float) -> list[Span]:
    scheduled_s, sent_s = result.scheduled_s, result.sent_s
    parts = [(UNSENT, scheduled_s, sent_s)]
    if result.error is not None:
        parts.append((FAILED, sent_s, result.ended_s))
    else:
        first_s, last_s = result.arrivals_s[0], result.arrivals_s[-1]
        parts += [(FIRST_TOKEN, sent_s, first_s), (DECODE, first_s, last_s)]
    return [
        Span(part=part, start_s=begin - start_s, end_s=end - start_s)
        for part, begin, end in parts
        if end > begin
    ]
