"""What the report draws, as data: lines, and a timeline. How they look is for those who draw.

Times of a replay count from when its first request was due.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from loadtest.report import METRIC_TITLES, Replay, RequestResult, Summary, metric_values, percentile

NUM_CDF_POINTS = 200
NUM_TIME_BINS = 120
# Narrower than an arrival's gap, a bin shows the gaps and not the rate.
MIN_BIN_S = 0.05
MAX_TIMELINE_ROWS = 300
# The parts of a request's life that its client can tell apart.
UNSENT, FIRST_TOKEN, DECODE = "waiting to be sent", "queue and prefill", "decode"
PARTS = (UNSENT, FIRST_TOKEN, DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One replay and its summary."""

    summary: Summary
    observed: Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    has_marks: bool = False  # each point is a measurement of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    slug: str
    title: str
    x_label: str
    y_label: str
    series: list[Series]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    part: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One row a request, in order of arrival."""

    slug: str
    title: str
    x_label: str
    rows: list[list[Span]]


Figure: TypeAlias = Lines | Timeline


def figures(shown: Run, rates: list[Run]) -> list[Figure]:
    """Those of one replay, after those of the sweep that it is from. Empty ones are left out."""
    drawn: list[Figure] = []
    if rates:
        drawn += [_against_throughput(rates, metric) for metric in ("ttft", "tpot", "e2el")]
    done = shown.observed.completed
    drawn += [_cdf(done, metric) for metric in METRIC_TITLES]
    drawn += [_tokens_over_time(shown.observed), _in_flight_over_time(shown.observed)]
    drawn.append(_timeline(shown.observed))
    return [figure for figure in drawn if _has_data(figure)]


def _has_data(figure: Figure) -> bool:
    if isinstance(figure, Timeline):
        return bool(figure.rows)
    return any(series.xs for series in figure.series)


def _against_throughput(rates: list[Run], metric: str) -> Lines:
    """In order of the rate, so that the line bends back where more load brings less.

    A hopeless rate was left early, so what it shows is the part that was seen.
    """
    short, title = METRIC_TITLES[metric]
    points = []
    for run in sorted(rates, key=lambda run: float(run.summary["request_rate"])):
        values = sorted(metric_values(run.observed.completed)[metric])
        if values:
            ms = [percentile(values, percent) * 1000 for percent in (50, 99)]
            points.append((run.summary["output_throughput"], *ms))
    return Lines(
        slug=f"{metric}-against-throughput",
        title=f"{title} against throughput",
        x_label="output tokens/s",
        y_label=f"{short}, ms",
        series=[
            Series(
                name=name,
                xs=[point[0] for point in points],
                ys=[point[column] for point in points],
                has_marks=True,
            )
            for column, name in ((1, "p50"), (2, "p99"))
        ],
    )


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
    )


def _start_s(observed: Replay) -> float:
    return min((result.scheduled_s for result in observed.results), default=0.0)


def _bins(observed: Replay) -> tuple[float, list[float]]:
    """A bin's width in seconds, and where each has its middle."""
    width = max(MIN_BIN_S, observed.duration_s / NUM_TIME_BINS)
    num = max(1, round(observed.duration_s / width))
    return width, [(index + 0.5) * width for index in range(num)]


def _tokens_over_time(observed: Replay) -> Lines:
    start_s, (width, middles) = _start_s(observed), _bins(observed)
    tokens = [0.0] * len(middles)
    for result in observed.completed:
        weight = result.num_output_tokens / len(result.arrivals_s)
        for arrival_s in result.arrivals_s:
            index = min(int((arrival_s - start_s) / width), len(tokens) - 1)
            tokens[index] += weight / width
    return Lines(
        slug="tokens-over-time",
        title="Output tokens over time",
        x_label="seconds",
        y_label="tokens/s",
        series=[Series(name="output tokens/s", xs=middles, ys=tokens)],
    )


def _in_flight_over_time(observed: Replay) -> Lines:
    start_s, (_, middles) = _start_s(observed), _bins(observed)
    changes = sorted(
        change
        for result in observed.results
        for change in ((result.sent_s - start_s, 1), (result.ended_s - start_s, -1))
    )
    counts, running, index = [], 0, 0
    for middle in middles:
        while index < len(changes) and changes[index][0] <= middle:
            running += changes[index][1]
            index += 1
        counts.append(float(running))
    return Lines(
        slug="in-flight-over-time",
        title="Requests in flight over time",
        x_label="seconds",
        y_label="requests",
        series=[Series(name="in flight", xs=middles, ys=counts)],
    )


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
    edges = [result.scheduled_s, result.sent_s]
    edges += [result.arrivals_s[0], result.arrivals_s[-1]] if result.arrivals_s else []
    if len(edges) == 2:
        edges.append(result.ended_s)
    return [
        Span(part=part, start_s=begin - start_s, end_s=end - start_s)
        for part, begin, end in zip(PARTS, edges, edges[1:], strict=False)
        if end > begin
    ]
