"""Every rung at toy sizes in Triton's interpreter, and every failure simulated at every rung."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from tests.bench.gpu.rungs import RUNGS
from tests.bench.test_gpu_ladder import AFTER, MESSAGES, Climbed
from tests.support.run_rehearsal import rungs

# Each rung has its limit on a GPU, and the interpreter is slow on a busy machine.
PATIENCE = "6"


def _suite(out: Path, *arguments: str) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
    command = [sys.executable, "-m", "tests.bench.gpu.suite", "--tiny", "--out", str(out)]
    command += ["--patience", PATIENCE, "--minutes", "30", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    return ended.returncode, rows, json.loads((out / "summary.json").read_text())


@pytest.mark.timeout(1800)
def test_every_rung_passes_at_toy_sizes_and_the_parts_behind_it_run(tmp_path: Path) -> None:
    status, rows, summary = _suite(tmp_path / "out", "--parts", "probe,tests,compile,device,linear")
    assert summary["failures"] == [] and status == 0
    assert [row["rung"] for row in rows if "rung" in row] == [rung.name for rung in RUNGS]
    assert all(row["num_equal"] == row["num_ids"] for row in rows if "num_ids" in row)
    assert summary["way"]["overlaps"] and summary["way"]["graphs"]
    assert [row["states"].get("failed") for row in rows if row.get("part") == "tests"] == [None] * 2


@pytest.mark.timeout(1800)
def test_real_parts_run_in_the_way_that_a_simulated_failure_leaves(tmp_path: Path) -> None:
    simulated = [f"--simulate={rung.name}=pass" for rung in RUNGS if rung.name != "start"]
    graphs = ["--simulate=graph=refusal", "--simulate=graph-pdl=refusal"]
    parts = ("--parts", "probe,device,goals-small,ready")
    _, rows, summary = _suite(tmp_path / "out", *parts, *simulated, *graphs)
    assert {row["what"] for row in summary["failures"]} == {"graph", "graph-pdl"}
    assert summary["way"]["name"] == "kernels one by one, without graphs, with PDL"
    (load,) = [row for row in rows if row.get("part") == "load"]
    assert load["graphs"] is False
    assert [row["ready_s"] > 0 for row in rows if row.get("part") == "ready"] == [True]


@pytest.mark.parametrize("kind", ["hang", "refusal", "abort", "wrong"])
@pytest.mark.parametrize("name", list(AFTER))
def test_any_failure_at_any_rung_loses_that_rung_alone(
    tmp_path: Path, name: str, kind: str
) -> None:
    climbed = Climbed(tmp_path, {name: kind}, patience=0.1 if kind == "hang" else 1.0)
    assert list(climbed.failures) == [name] and MESSAGES[kind] in climbed.failures[name]
    assert climbed.way == AFTER[name]


def test_every_rung_in_full_size_does_what_a_gpu_allows() -> None:
    names = [rung.name for rung in RUNGS]
    assert [row["rung"] for row in rungs(*names) if row["is_right"]] == names
