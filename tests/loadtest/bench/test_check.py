"""`penstock bench --check`: a measurement against what a plan expects."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.loadtest.bench.cli import main
from penstock.loadtest.bench.forecast import Checked, Forecast, ForecastFigure, load_of
from penstock.loadtest.workload.config import WorkloadConfig
from tests.support.stub_server import answer_five, stub

LOAD = WorkloadConfig(seed=3, num_prompts=4, input_len=4, output_len=5, request_rate=200.0)
FLAGS = ["--num-prompts", "4", "--request-rate", "200", "--seed", "3", "--random-input-len", "4"]
FLAGS += ["--random-output-len", "5", "--disable-tqdm"]
# The stub answers within a second, and in no less than nothing.
WIDE = ForecastFigure(figure="TTFT p99, ms", key="p99_ttft_ms", value=5.0, low=0.0, high=60_000.0)
WRONG = ForecastFigure(figure="TPOT p99, ms", key="p99_tpot_ms", value=9e9, low=8e9, high=1e10)


def plan_file(
    folder: Path,
    *figures: ForecastFigure,
    load: WorkloadConfig = LOAD,
    ttft_target_ms: float = 60_000.0,
) -> Path:
    path = folder / "plan.json"
    targets_ms = {"ttft": ttft_target_ms}
    made = Forecast(load=load_of(load), targets_ms=targets_ms, figures=list(figures))
    path.write_text(json.dumps({"format": 1, "forecast": asdict(made), "more": "ignored"}))
    return path


def checked(path: Path, *flags: str) -> int:
    with stub(answer_five) as server:
        return main(["--base-url", server.url, *FLAGS, "--check", str(path), *flags])


def test_a_measurement_within_all_error_bars_does_not_refute_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(plan_file(tmp_path, WIDE)) == 0
    shown = capsys.readouterr().out
    assert "not refuted: all 1 figures are within their error bars" in shown
    assert "Serving Benchmark Result" in shown


def test_a_bar_that_is_wide_and_holds_the_target_tests_nothing_and_has_a_status_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(tmp_path, WIDE, ttft_target_ms=10.0)
    assert checked(path) == 3
    shown = capsys.readouterr().out
    assert "not tested: the error bars that hold a target are too wide" in shown
    assert "yes, too wide" in shown and "not refuted" not in shown
    assert checked(path, "--json") == 3
    assert json.loads(capsys.readouterr().out)["is_testable"] is False
    assert checked(plan_file(tmp_path, WIDE, WRONG, ttft_target_ms=10.0)) == 1


@pytest.mark.parametrize(
    ("low", "high", "is_testable"),
    [
        (10.0, 40.0, True),
        (10.0, 40.1, False),
        (0.1, 30.0, True),  # all of it meets the target, so that a missed target refutes it
        (0.0, 31.0, False),
    ],
)
def test_a_bar_tests_a_target_that_is_above_it_or_if_its_ends_are_at_most_4_times_apart(
    low: float, high: float, is_testable: bool
) -> None:
    bar = replace(WIDE, value=20.0, low=low, high=high)
    made = Forecast(load={}, targets_ms={"ttft": 30.0}, figures=[bar])
    assert made.is_testable == is_testable and (made.too_wide == []) == is_testable
    assert made.meets_targets


def test_one_undecided_target_that_can_be_tested_is_enough_and_a_decided_one_is_not() -> None:
    wide, tpot = replace(WIDE, value=20.0), replace(WRONG, value=9.0, low=8.0, high=10.0)
    made = Forecast(load={}, targets_ms={"ttft": 30.0, "tpot": 9.5}, figures=[wide, tpot])
    assert made.is_testable and made.too_wide == [wide] and made.undecided == [wide, tpot]
    decided = replace(made, targets_ms={"ttft": 30.0, "tpot": 10.0})
    assert not decided.is_testable and decided.meets_targets
    assert not replace(made, targets_ms={"ttft": 30.0, "tpot": 8.5}).meets_targets


def test_one_figure_outside_of_its_error_bar_refutes_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(plan_file(tmp_path, WIDE, WRONG)) == 1
    assert "refuted: 1 of 2 figures" in capsys.readouterr().out


def test_the_json_has_each_figure_with_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(plan_file(tmp_path, WIDE, WRONG), "--json") == 1
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert result["is_refuted"] is True
    assert [row["is_within"] for row in result["check"]] == [True, False]
    assert result["check"][0]["measured"] == pytest.approx(result["p99_ttft_ms"])


def test_a_figure_that_nothing_was_measured_of_is_not_within() -> None:
    assert not Checked(WIDE, None).is_within
    assert Checked(WIDE, 0.0).is_within and Checked(WIDE, 60_000.0).is_within


@pytest.mark.parametrize(
    ("load", "flags", "why"),
    [
        (WorkloadConfig(seed=4, num_prompts=4), [], "the plan expects what happens at seed=4"),
        (LOAD, ["--request-rate", "100"], "request_rate=200.0, and here it is 100.0"),
        (LOAD, ["--max-concurrency", "2"], "--check cannot be combined with --max-concurrency"),
        (LOAD, ["--sweep", "--goodput", "ttft:9"], "--check cannot be combined with --sweep"),
    ],
)
def test_another_load_than_the_planned_one_is_refused_before_it_is_sent(
    load: WorkloadConfig,
    flags: list[str],
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = plan_file(tmp_path, WIDE, load=load)
    assert main([*FLAGS, "--base-url", "http://127.0.0.1:9", "--check", str(path), *flags]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read: No such file or directory"),
        ("[]", "is not a file of penstock plan"),
        ('{"forecast": null}', "found no plan"),
    ],
)
def test_a_file_that_is_no_plan_is_one_sentence(
    text: str | None, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    assert main([*FLAGS, "--check", str(path)]) == 2
    assert why in capsys.readouterr().err
