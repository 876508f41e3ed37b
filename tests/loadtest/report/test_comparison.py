"""Results side by side: values, ratios, which is better, and why they may not be comparable."""

from typing import Any

import pytest

from penstock.loadtest.report.comparison import (
    SAME,
    WITHIN_SPREAD,
    Comparison,
    Row,
    Side,
    compare,
    comparison_text,
)
from penstock.loadtest.report.comparison_html import comparison_html
from penstock.scheduler.errors import InvalidConfig

RUN: dict[str, Any] = {
    "date": "20261122-040133",
    "model_id": "m",
    "completed": 10,
    "failed": 0,
    "request_throughput": 4.0,
    "output_throughput": 100.0,
    "mean_ttft_ms": 20.0,
    "median_ttft_ms": 18.0,
    "p99_ttft_ms": 50.0,
}


def compared(*sides: list[dict[str, Any]]) -> Comparison:
    return compare(
        [
            Side(name=name, paths=f"{name}.json", runs=[RUN | run for run in runs])
            for name, runs in zip("ABCDE", sides, strict=False)
        ]
    )


def row(comparison: Comparison, key: str) -> Row:
    (found,) = [row for row in comparison.rows if row.metric.key == key]
    return found


def test_more_throughput_and_less_latency_is_better() -> None:
    result = compared([{}], [{"output_throughput": 150.0, "mean_ttft_ms": 30.0}])
    throughput, latency = row(result, "output_throughput"), row(result, "mean_ttft_ms")
    assert (throughput.ratio(1), throughput.verdict(1, result.names)[0]) == (1.5, "B")
    assert (latency.ratio(1), latency.verdict(1, result.names)[0]) == (1.5, "A")
    assert row(result, "request_throughput").verdict(1, result.names)[0] == SAME
    assert row(result, "completed").verdict(1, result.names)[0] == ""


def test_a_value_is_the_median_of_its_runs_and_overlapping_ranges_say_nothing() -> None:
    first = [{"output_throughput": value} for value in (100.0, 90.0, 130.0)]
    second = [{"output_throughput": value} for value in (125.0, 200.0, 140.0)]
    apart = [{"output_throughput": value} for value in (140.0, 200.0, 131.0)]
    result = compared(first, second, apart)
    throughput = row(result, "output_throughput")
    assert [value and value.middle for value in throughput.values] == [100.0, 140.0, 140.0]
    assert throughput.verdict(1, result.names)[0] == WITHIN_SPREAD
    assert throughput.verdict(1, result.names)[1] is None
    assert throughput.verdict(2, result.names)[0] == "C"


def test_one_run_within_the_range_of_the_others_says_nothing() -> None:
    repeated = [{"output_throughput": value} for value in (90.0, 115.0)]
    result = compared([{}], repeated, [{"output_throughput": 101.0}])
    throughput = row(result, "output_throughput")
    assert throughput.verdict(1, result.names)[0] == WITHIN_SPREAD
    assert throughput.verdict(2, result.names)[0] == "C"
    assert "A and C are one run each" in result.notes[-1]


def test_percentiles_that_only_one_side_has_are_left_out_and_the_others_are_in_order() -> None:
    result = compared([{"p95_ttft_ms": 40.0, "p99.9_ttft_ms": 60.0}], [{"p99.9_ttft_ms": 61.0}])
    labels = [row.metric.label for row in result.rows]
    assert labels[-4:] == ["Mean TTFT, ms", "Median TTFT, ms", "P99 TTFT, ms", "P99.9 TTFT, ms"]


def test_a_value_that_is_missing_or_not_a_number_has_no_ratio() -> None:
    result = compared([{}], [{"mean_ttft_ms": float("nan")}], [{"mean_ttft_ms": 10.0}])
    latency = row(result, "mean_ttft_ms")
    assert (latency.ratio(1), latency.verdict(1, result.names)[0]) == (None, "")
    assert latency.ratio(2) == 0.5
    assert "0.500" in comparison_text(result)


@pytest.mark.parametrize(
    ("first", "second", "note"),
    [
        ({"max_concurrency": 4}, {"max_concurrency": 8}, "max_concurrency is 4 in A, 8 in B"),
        ({"request_rate": "inf"}, {"request_rate": 2.5}, "request_rate is inf in A, 2.5 in B"),
        ({"max_concurrency": None}, {"max_concurrency": 8}, "is not set in A, 8 in B"),
        ({"goodput": {"ttft": 200.0}}, {"goodput": None}, "goodput is ttft:200 in A, not set in B"),
        ({"model_id": "x"}, {}, "model_id is x in A, m in B"),
        ({"total_output_tokens": 1000}, {"total_output_tokens": 900}, "is 1,000 in A, 900 in B"),
    ],
)
def test_other_workloads_are_told(first: dict[str, Any], second: dict[str, Any], note: str) -> None:
    (told,) = [each for each in compared([first], [second]).notes if "differ" in each]
    assert told.startswith("the workloads differ: ") and note in told


def test_what_one_tool_does_not_write_and_a_drawn_seed_are_no_difference() -> None:
    ours = {"seed": 1, "dataset_name": "random", "total_input_tokens": 1000}
    theirs = {"seed": 2, "total_input_tokens": 1010}
    assert not any("differ" in note for note in compared([ours], [theirs]).notes)


def test_an_interrupted_run_is_told() -> None:
    notes = compared([{}, {"is_interrupted": True}], [{}]).notes
    assert "1 of the 2 runs of A were interrupted" in notes


def test_results_without_a_common_number_cannot_be_compared() -> None:
    sweep = Side(name="A", paths="a", runs=[{"max_request_rate": 5.0}])
    run = Side(name="B", paths="b", runs=[RUN])
    with pytest.raises(InvalidConfig, match="compare sweeps with sweeps"):
        compare([sweep, run])
    (rate,) = compare([sweep, Side(name="B", paths="b", runs=[{"max_request_rate": 6.0}])]).rows
    assert rate.verdict(1, ["A", "B"])[0] == "B"


def test_the_text_has_a_row_for_each_number_and_its_columns_line_up() -> None:
    result = compared([{}, {"output_throughput": 120.0}], [{"output_throughput": 1000.0}])
    lines = comparison_text(result).splitlines()
    assert lines[0] == "A  A.json: m, 22 November 2026, 04:01, median of 2 runs"
    (head,) = [line for line in lines if "B/A" in line]
    (shown,) = [line for line in lines if line.startswith("Output tokens/s")]
    assert shown.split() == [
        "Output",
        "tokens/s",
        "110.00",
        "(100.00-120.00)",
        "1,000.00",
        "9.091",
        "B",
    ]
    for column in ("A", "B", "B/A"):
        assert head[: head.index(f" {column} ") + 1 + len(column)][-1].strip()
    assert shown.index("9.091") + 5 == head.index("B/A") + 3
    assert shown.rindex("B") == head.index("better")


def test_the_page_has_the_same_numbers_and_loads_nothing() -> None:
    result = compared([{}], [{"output_throughput": 1234.5}])
    page = comparison_html(result)
    assert "1,234.50" in page and "12.345" in page
    assert all(note in page for note in result.notes)
    assert "http" not in page and "<script" not in page and "url(" not in page
