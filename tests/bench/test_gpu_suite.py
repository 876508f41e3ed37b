"""The suite of GPU measurements at toy sizes: its output, and what it does when a part fails."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from tests.bench.engine.__main__ import main as bench
from tests.bench.gpu.goals import GOALS, LLAMA, SMALL, table, verdicts, with_shares
from tests.bench.gpu.suite import PARTS, Suite, main


def _suite(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, the JSON file, and what it printed."""
    out = tmp_path / "results" / "suite.json"
    command = [
        sys.executable,
        "-m",
        "tests.bench.gpu.suite",
        "--tiny",
        "--out",
        str(out),
        *arguments,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert out.exists(), ended.stderr
    return ended.returncode, json.loads(out.read_text()), ended.stdout


def test_each_goal_is_reported_and_a_failing_part_ends_no_other(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    status, result, printed = _suite(
        tmp_path, "--parts", "small", "attention", "device", "--flash-attn-3", str(missing)
    )
    assert status == 1
    assert list(result["seconds"]) == ["device", "attention", "small"]  # by importance
    messages = [failure["message"] for failure in result["failures"]]
    assert len(messages) == 2 and all(str(missing) in message for message in messages)
    assert "2 failures" in printed
    right = [row for row in result["rows"] if row.get("is_right")]
    assert {"rms_norm", "sample", "gather_decodes"} <= {row["kernel"] for row in right}
    assert all(row["of_copy"] > 0 for row in right)
    assert all(f"{goal.what} " in printed for goal in GOALS)
    assert {goal["is"] for goal in result["goals"]} == {"not measured"}


def test_steps_are_timed_and_points_that_do_not_fit_are_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench(["steps", SMALL, "--tiny"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"]
    points = [row for row in rows if row["part"] == "decode"]
    skipped = [row for row in points if "skipped" in row]
    assert len(points) == 2 and len(skipped) == 1
    assert all(row in skipped or row["tpot_ms"] > 0 for row in points)
    assert next(row for row in rows if row["part"] == "ttft")["ttft_ms"] > 0
    assert next(row for row in rows if row["part"] == "overlap")["one_by_one_ms"] > 0


def test_when_the_time_is_used_up_the_rest_is_noted_as_not_run(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    assert main(["--tiny", "--minutes", "0", "--out", str(out)]) == 1
    failures = json.loads(out.read_text())["failures"]
    assert [failure["part"] for failure in failures] == [part.name for part in PARTS]
    assert all("--minutes" in failure["message"] for failure in failures)


def test_an_unknown_part_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--parts", "everything"]) == 2
    assert "choose from device, steps-llama" in capsys.readouterr().err


def test_a_kernel_that_is_wrong_is_a_failure(tmp_path: Path) -> None:
    suite = Suite(tiny=True, flash_attn_3=None, ends_s=0.0)
    suite.note({"part": "kernel", "kernel": "embed", "error": 0.5, "is_right": False})
    assert "kernel=embed, error=0.5" in suite.failures[0]["message"]


def test_a_goal_is_met_on_its_own_side_of_the_limit() -> None:
    at: dict[str, Any] = {"part": "decode", "model": LLAMA, "batch": 1, "context": 512}
    device = {"part": "device", "copy_bytes_per_s": 4.0e12}
    for tpot_ms, rate, words in ((3.8, 3.7e12, ["met", "met"]), (4.0, 3.5e12, ["NOT MET"] * 2)):
        row = with_shares({**at, "tpot_ms": tpot_ms, "bytes_per_s": rate}, device)
        found = verdicts([{**at, "context": 2048, "tpot_ms": 9.0}, row])
        assert [verdict.word for verdict in found[:2]] == words
        assert f"{tpot_ms:.2f}" in table(found)


def test_flash_attentions_time_is_stated_over_ours() -> None:
    row = {"part": "kernel", "us": 100.0, "rivals": {"vLLM's FlashAttention 3": 90.0}}
    assert with_shares(row, {})["flash_attention_3_over_ours"] == pytest.approx(0.9)
