"""The report's figures follow their definitions, and its form is that of `vllm bench serve`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loadtest.report.report import (
    Replay,
    ReportConfig,
    percentile,
    render,
    report_warnings,
    summarize,
)
from tests.support.results import result

# One token an event; two tokens an event; a single token; one turned away.
REPLAY = Replay(
    results=[
        result(0, sent=0.0, arrivals=(0.5, 0.6, 0.8, 0.9)),
        result(1, sent=1.0, arrivals=(1.25, 1.45, 1.65), tokens=6),
        result(2, sent=1.5, arrivals=(1.6,)),
        result(3, sent=1.5, status=429, error="HTTP 429: full"),
    ],
    duration_s=2.0,
    client_cpu_share=0.1,
)


def test_figures_follow_their_definitions() -> None:
    summary = summarize(REPLAY, ReportConfig(percentiles=(50.0, 100.0)))
    assert (summary["completed"], summary["failed"], summary["rejected"]) == (3, 1, 1)
    assert summary["total_input_tokens"] == 300
    assert summary["total_output_tokens"] == 4 + 6 + 1
    assert summary["output_throughput"] == pytest.approx(11 / 2)
    assert summary["request_throughput"] == pytest.approx(3 / 2)
    assert summary["total_token_throughput"] == pytest.approx(311 / 2)
    assert summary["mean_ttft_ms"] == pytest.approx((500 + 250 + 100) / 3)
    assert summary["p50_ttft_ms"] == pytest.approx(250)
    # (last - first) / (tokens - 1): 400 / 3 and 400 / 5; a single token has no TPOT.
    assert summary["mean_tpot_ms"] == pytest.approx((400 / 3 + 400 / 5) / 2)
    assert summary["mean_itl_ms"] == pytest.approx((100 + 200 + 100 + 200 + 200) / 5)
    assert summary["p100_itl_ms"] == pytest.approx(200)
    assert summary["median_e2el_ms"] == pytest.approx(650)
    assert summary["max_concurrent_requests"] == 3
    assert summary["max_output_tokens_per_s"] == pytest.approx(7)


def test_latency_is_ttft_plus_tpot_times_the_other_tokens() -> None:
    for done in REPLAY.completed:
        expected = done.ttft_s + (done.tpot_s or 0.0) * (done.num_output_tokens - 1)
        assert done.latency_s == pytest.approx(expected)


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    limits = {"ttft": 300.0, "tpot": 100.0}
    summary = summarize(REPLAY, ReportConfig(goodput_ms=limits))
    assert summary["request_goodput"] == pytest.approx(2 / 2.0)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([10.0, 20.0, 30.0, 40.0], 50, 25.0),
        ([10.0, 20.0, 30.0, 40.0], 90, 37.0),
        ([10.0, 20.0, 30.0, 40.0], 0, 10.0),
        ([10.0, 20.0, 30.0, 40.0], 100, 40.0),
        ([5.0], 99, 5.0),
    ],
)
def test_percentiles_lie_on_the_line_between_two_ranks(
    values: list[float], percent: float, expected: float
) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(0, 99))
def test_percentiles_rise_and_stay_within_the_values(values: list[float], percent: int) -> None:
    values.sort()
    here, above = percentile(values, percent), percentile(values, percent + 1)
    assert here <= above or here == pytest.approx(above)
    assert values[0] - 1e-6 <= here <= values[-1] + 1e-6


def test_the_text_is_laid_out_as_vllm_does() -> None:
    config = ReportConfig(metrics=("ttft", "tpot"), percentiles=(99.0,))
    summary = summarize(REPLAY, config) | {"request_rate": 10.0, "max_concurrency": 64}
    assert render(summary, config).splitlines() == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     3         ",
        "Failed requests:                         1         ",
        "  of these rejected (429):               1         ",
        "Maximum request concurrency:             64        ",
        "Request rate configured (RPS):           10.00     ",
        "Benchmark duration (s):                  2.00      ",
        "Total input tokens:                      300       ",
        "Total generated tokens:                  11        ",
        "Request throughput (req/s):              1.50      ",
        "Output token throughput (tok/s):         5.50      ",
        "Peak output token throughput (tok/s):    7.00      ",
        "Peak concurrent requests:                3.00      ",
        "Total token throughput (tok/s):          155.50    ",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          283.33    ",
        "Median TTFT (ms):                        250.00    ",
        "P99 TTFT (ms):                           495.00    ",
        "-----Time per Output Token (excl. 1st token)------",
        "Mean TPOT (ms):                          106.67    ",
        "Median TPOT (ms):                        106.67    ",
        "P99 TPOT (ms):                           132.80    ",
        "==================================================",
    ]


def test_a_run_without_one_success_has_a_report() -> None:
    failed = Replay(results=[result(error="no")], duration_s=1.0, client_cpu_share=0.0)
    summary = summarize(failed, ReportConfig())
    assert summary["mean_ttft_ms"] is None
    assert "Mean TTFT (ms):                          -" in render(summary, ReportConfig())


def test_failures_and_a_busy_client_are_reported() -> None:
    late = result(4, sent=2.0, arrivals=(2.1, 2.2))
    late.scheduled_s = 1.8
    busy = Replay(results=[*REPLAY.results, late], duration_s=2.0, client_cpu_share=0.95)
    warnings = "\n".join(report_warnings(busy, has_due_times=True, cache_advice=""))
    assert "1 x HTTP 429: full" in warnings
    assert "busy 95%" in warnings
    assert "200 ms later" in warnings
    warnings = "\n".join(report_warnings(busy, has_due_times=False, cache_advice=""))
    assert "later" not in warnings


def test_a_share_of_cached_prompt_tokens_is_warned_of() -> None:
    cold, warm = result(0, arrivals=(0.1, 0.2)), result(1, arrivals=(0.1, 0.2))
    warm.num_cached_tokens = 80
    for results, is_warned in (([cold], False), ([cold, warm], True)):
        replay = Replay(results=results, duration_s=2.0, client_cpu_share=0.1)
        warnings = report_warnings(replay, has_due_times=False, cache_advice="why")
        warning = "40% of the prompt tokens were in the server's prefix cache: why"
        assert (warning in warnings) is is_warned
    summary = summarize(replay, ReportConfig())
    assert summary["total_cached_input_tokens"] == 80


def test_the_peak_throughput_of_a_short_run_is_not_below_its_mean() -> None:
    short = [result(i, arrivals=tuple(0.01 * n for n in range(1, 21))) for i in range(4)]
    summary = summarize(
        Replay(results=short, duration_s=0.25, client_cpu_share=0.1), ReportConfig()
    )
    assert summary["max_output_tokens_per_s"] >= summary["output_throughput"] == 320
