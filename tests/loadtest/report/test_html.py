"""The report's page: a date to read, the percentiles in its figures, and the JSON's numbers."""

import re

import pytest

from penstock.loadtest.report.figures import Lines, Measurement, Timeline, figures
from penstock.loadtest.report.html import html_report
from penstock.loadtest.report.report import Replay, ReportConfig, readable_date, summarize
from penstock.loadtest.report.svg import short_number
from tests.support.results import result

SETTINGS = {
    "model_id": "m",
    "date": "20261122-040133",
    "dataset_name": "random",
    "seed": 1,
    "backend": "openai",
}


def run(num: int) -> Measurement:
    """TTFTs of 1 to `num` ms."""
    results = [result(n, arrivals=(n / 1000, n / 1000 + 0.1)) for n in range(1, num + 1)]
    observed = Replay(results=results, duration_s=2.0, client_cpu_share=0.1)
    return Measurement(summary=SETTINGS | summarize(observed, ReportConfig()), observed=observed)


def test_a_date_is_written_for_people_and_others_are_left_alone() -> None:
    assert readable_date("20261122-040133") == "22 November 2026, 04:01"
    assert readable_date("yesterday") == "yesterday"


def test_the_marks_of_a_distribution_are_the_percentiles_of_the_json() -> None:
    shown = run(200)
    (ttft,) = [figure for figure in figures(shown, []) if figure.slug == "ttft-cdf"]
    assert isinstance(ttft, Lines)
    assert [mark.name for mark in ttft.marks] == ["p50", "p90", "p95", "p99"]
    keys = ("median_ttft_ms", "p90_ttft_ms", "p95_ttft_ms", "p99_ttft_ms")
    assert [mark.x for mark in ttft.marks] == pytest.approx([shown.summary[key] for key in keys])
    page = html_report(shown.summary, [ttft], "text", [])
    assert all(f">p{n} " in page for n in (50, 90, 95, 99))
    assert f">p99 {short_number(shown.summary['p99_ttft_ms'])}<" in page


def test_the_timeline_of_many_requests_is_no_higher_than_other_figures() -> None:
    (timeline,) = [each for each in figures(run(1000), []) if isinstance(each, Timeline)]
    assert len(timeline.rows) == 100
    page = html_report(run(1).summary, [timeline], "", [])
    (size,) = re.findall(r'viewBox="0 0 (\d+) (\d+)"', page)
    assert int(size[1]) < int(size[0])


def test_the_page_has_the_notes_and_each_number_of_the_json() -> None:
    shown = run(3)
    page = html_report(shown.summary, [], "", ["the client was <slow>"])
    assert "the client was &lt;slow&gt;" in page
    assert "<title>m: load test of 22 November 2026, 04:01</title>" in page
    for key, value in shown.summary.items():
        if value is not None and not isinstance(value, dict):
            text = f"{value:.6g}" if isinstance(value, float) else str(value)
            assert f"<dt>{key}</dt><dd>{text}</dd>" in page


def test_only_a_screen_is_dark() -> None:
    page = html_report(run(1).summary, [], "", [])
    assert "@media screen and (prefers-color-scheme:dark)" in page
    assert page.count("prefers-color-scheme") == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.01234, "0.0123"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234")],
)
def test_a_short_number_has_three_digits_or_more(value: float, text: str) -> None:
    assert short_number(value) == text
