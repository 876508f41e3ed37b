"""Figures of runs at the edge: failures, one short response, rates that were stopped early."""

from pathlib import Path

from penstock.loadtest.bench.sweep import RateResult, SweepResult, caveats
from penstock.loadtest.report.figures import (
    DECODE,
    FAILED,
    FIRST_TOKEN,
    Lines,
    Measurement,
    Timeline,
    figures,
)
from penstock.loadtest.report.report import Replay, ReportConfig, summarize
from penstock.loadtest.report.svg import ticks
from penstock.loadtest.workload.config import Dataset, WorkloadConfig
from tests.support.results import result


def run_of(observed: Replay, rate: float = 1.0) -> Measurement:
    return Measurement(
        summary=summarize(observed, ReportConfig()) | {"request_rate": rate}, observed=observed
    )


def completed(num: int, *, duration_s: float = 4.0, is_interrupted: bool = False) -> Replay:
    return Replay(
        results=[result(index, arrivals=(0.5, 1.0)) for index in range(num)],
        duration_s=duration_s,
        client_cpu_share=0.1,
        is_interrupted=is_interrupted,
    )


def test_a_failed_request_is_drawn_differently_from_a_completed_one() -> None:
    failed = result(1, sent=0.1, status=500, error="HTTP 500: no")
    observed = Replay(
        results=[result(0, arrivals=(0.5, 1.0)), failed], duration_s=1.0, client_cpu_share=0.1
    )
    (timeline,) = [
        figure for figure in figures(run_of(observed), []) if isinstance(figure, Timeline)
    ]
    assert [[span.part for span in row] for row in timeline.rows] == [
        [FIRST_TOKEN, DECODE],
        [FAILED],
    ]


def test_a_run_shorter_than_a_bin_still_shows_its_tokens() -> None:
    observed = Replay(results=[result(0, arrivals=(0.004,))], duration_s=0.01, client_cpu_share=0.1)
    drawn = {figure.slug: figure for figure in figures(run_of(observed), [])}
    over_time = drawn["tokens-over-time"]
    assert isinstance(over_time, Lines)
    (series,) = over_time.series
    assert (series.xs, series.ys, series.has_marks) == ([0.005], [100.0], True)
    assert "tpot-cdf" not in drawn  # a single token has none


def test_a_rate_that_was_stopped_early_is_not_on_the_line() -> None:
    rates = [
        run_of(completed(4), 1.0),
        run_of(completed(8), 2.0),
        run_of(completed(2, duration_s=1.0, is_interrupted=True), 4.0),
        run_of(completed(6), 1.0),  # the same rate once more: the later run is its point
    ]
    (figure,) = [
        each for each in figures(rates[0], rates) if each.slug == "ttft-against-throughput"
    ]
    assert isinstance(figure, Lines)
    assert [list(series.xs) for series in figure.series] == [[3.0, 4.0]] * 4 + [[4.0]]
    assert [series.has_line for series in figure.series] == [True] * 4 + [False]
    assert [series.name for series in figure.series][:4] == ["p50", "p90", "p95", "p99"]


def test_an_axis_of_zeros_has_a_scale() -> None:
    assert ticks(0.0) == [0.0, 1.0]


def test_a_sweep_lists_why_its_result_may_be_wrong() -> None:
    def listed(num_planned: int, rate: float, dataset: Dataset) -> list[str]:
        observed = completed(num_planned)
        row = RateResult(
            rate=rate,
            is_met=True,
            num_planned=num_planned,
            summary=run_of(observed).summary,
            observed=observed,
        )
        path = None if dataset is Dataset.RANDOM else Path("any")
        workload = WorkloadConfig(dataset=dataset, dataset_path=path)
        swept = SweepResult(rates=[row], met=rate, missed=None, is_interrupted=False)
        return caveats(swept, workload)

    assert listed(200, 10.0, Dataset.RANDOM) == []
    (short,) = listed(200, 100.0, Dataset.RANDOM)  # 2 s, and a request takes one
    assert "raise --sweep-seconds" in short
    (few,) = listed(20, 1.0, Dataset.RANDOM)
    assert "fewer than 100 requests" in few
    (cached,) = listed(200, 10.0, Dataset.CUSTOM)
    assert "prefix cache" in cached
