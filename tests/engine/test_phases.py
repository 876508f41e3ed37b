"""What the start of the engine reports of itself."""

import logging
from pathlib import Path

import pytest

from penstock.engine.process.phases import LoadProgress, Phases
from tests.support.executors import cpu_executor
from tests.support.tiny_models import FAMILIES, engine_config, make_model, save


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_of_all_weights_that_are_read_are_those_announced(
    family: str, tmp_path: Path
) -> None:
    path = save(make_model(family), tmp_path)
    reports: list[LoadProgress] = []
    cpu_executor(engine_config(path), path, Phases(reports.append))
    counts = [report.num_done for report in reports if report.phase == "weights"]
    last = next(report for report in reversed(reports) if report.phase == "weights")
    assert counts == sorted(counts) and counts[0] == 0
    assert last.num_done == last.total and last.unit == "bytes"


def test_a_phase_is_reported_and_logged_when_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reports: list[LoadProgress] = []
    phases = Phases(reports.append)
    with phases.timed("graphs", "capturing 2 CUDA graphs", total=2, unit="graphs"):
        assert caplog.messages == ["graphs: capturing 2 CUDA graphs"]
        assert reports == [LoadProgress("graphs", 0, 2, "graphs")]
    assert caplog.messages[1] == f"graphs: {phases.seconds['graphs']:.2f} s"


def test_many_small_advances_are_a_few_reports_and_the_last_is_complete() -> None:
    reports: list[LoadProgress] = []
    phases = Phases(reports.append)
    with phases.timed("weights", "reading", total=10_000):
        for _ in range(10_000):
            phases.advance()
    assert len(reports) < 1_000
    assert reports[-1].num_done == 10_000
