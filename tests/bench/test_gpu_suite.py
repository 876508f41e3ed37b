"""The suite of GPU measurements at toy sizes: its output, and what it does when a part fails."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed; pip install 'penstock[dev]'")

from penstock.engine.kernels.attention.flash_prefill import library
from penstock.engine.loading.gpu_ranks import SHARED_DEVICE
from tests.bench.engine.__main__ import main as bench
from tests.bench.engine.case import Bench, Case
from tests.bench.gpu import carried, rung
from tests.bench.gpu.goals import GOALS, H200, LLAMA, SMALL, table, verdicts, with_shares
from tests.bench.gpu.parts import Run
from tests.bench.gpu.record import Record
from tests.bench.gpu.suite import main


@pytest.mark.slow
def test_each_goal_is_reported_and_a_failing_part_ends_no_other(tmp_path: Path) -> None:
    out, missing = tmp_path / "results", tmp_path / "nothing"
    command = [sys.executable, "-m", "tests.bench.gpu.suite", "--tiny", "--out", str(out)]
    command += ["--parts", "tables,decode-attention", "device", "--flash-attn-3", str(missing)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1, ended.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary["seconds"]) == ["device", "decode-attention", "tables"]  # by importance
    (failure,) = summary["failures"]
    assert failure["of"] == "decode-attention" and str(missing) in failure["message"]
    assert "1 failures" in ended.stdout
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    right = {row["kernel"] for row in rows if row.get("is_right")}
    assert {"gather_decodes", "gather_chunks"} <= right
    assert "of_copy" in (out / "summary.txt").read_text()
    assert all(f"{goal.what} " in ended.stdout for goal in GOALS)
    assert {goal["is"] for goal in summary["goals"]} == {"not measured"}


def _bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert bench([*arguments, "--tiny"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"]


@pytest.mark.slow
def test_steps_are_timed_and_points_that_do_not_fit_are_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = _bench(capsys, "steps", SMALL)
    points = [row for row in rows if row["part"] == "decode"]
    skipped = [row for row in points if "skipped" in row]
    assert len(points) == 2 and len(skipped) == 1
    assert all(row in skipped or row["tpot_ms"] > 0 for row in points)


@pytest.mark.slow
def test_requests_are_timed_with_two_stages_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SHARED_DEVICE, raising=False)  # which the benchmark sets
    (row,) = _bench(capsys, "ranks", SMALL, "--pipeline-parallel-size", "2")
    assert row["pipeline_parallel_size"] == 2 and row["tokens_per_s"] > 0
    assert 0 < row["bubble_ratio"] < 1


@pytest.mark.slow
def test_the_points_that_goals_name_are_timed_alone_and_say_how_kernels_were_launched(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = _bench(capsys, "steps", SMALL, "--points", "goals", "--enforce-eager")
    assert [row["part"] for row in rows] == ["load", "ttft", "decode"]
    assert rows[0]["graphs"] is False and rows[0]["overlaps"] is False
    assert rows[1]["ttft_ms"] > 0 and rows[2]["tpot_ms"] > 0


@pytest.mark.slow
def test_first_tokens_of_longer_prompts_are_timed_by_attention_backend(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--points", "prefill", "--attention-backend", "triton")
    _, *rows = _bench(capsys, "steps", SMALL, *flags)
    assert [(row["part"], row["prompt"]) for row in rows] == [("prefill ttft", n) for n in (8, 24)]
    assert all(row["attention_backend"] == "triton" and row["ttft_ms"] > 0 for row in rows)


def test_the_product_finds_the_library_of_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "flash_attn_3"
    folder.mkdir()
    (folder / "_vllm_fa3_C.abi3.so").touch()
    monkeypatch.setattr(carried, "_UNPACKED", tmp_path / "unpacked")
    for _ in range(2):  # another run may have made it
        monkeypatch.syspath_prepend(carried.as_package(folder))
    found = library()
    assert found is not None and found[1] == "_vllm_fa3_C"
    assert found[0].resolve() == (folder / "_vllm_fa3_C.abi3.so").resolve()


@pytest.mark.slow
def test_overlap_is_timed_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    rows = _bench(capsys, "steps", SMALL, "--points", "overlap")
    assert [row["part"] for row in rows] == ["load", "overlap"]
    assert rows[1]["one_by_one_ms"] > 0


@pytest.mark.slow
def test_steps_with_drafts_are_timed_and_right_ones_accepted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, *rows = _bench(capsys, "steps", SMALL, "--points", "drafts")
    timed = [row for row in rows if row["part"] == "drafts"]
    assert [row["drafts"] for row in timed] == [0, 1, 3, 7]
    assert all(row["step_ms"] > 0 for row in timed)
    checked = [row for row in rows if row["part"] == "drafts accepted"]
    assert [row["drafts"] for row in checked] == [1, 3, 7]
    assert all(row["is_right"] and row["of_right"] == 1 for row in checked)


@pytest.mark.slow
def test_blocks_on_their_way_to_the_host_and_prefixes_from_there_are_timed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    *moves, first = _bench(capsys, "offload", SMALL)
    at = {(row["direction"], row["blocks"]) for row in moves}
    assert at == {(way, num) for way in ("to the host", "to the device") for num in (1, 3)}
    assert all(row["is_right"] and row["of_link"] and row["kernel_gb_per_s"] for row in moves)
    assert first["part"] == "offload ttft" and first["is_right"]
    assert first["loaded_tokens"] == first["prefix"] == 32
    assert min(first["computed_ms"], first["from_memory_ms"], first["from_pool_ms"]) > 0


def test_tiles_of_the_linear_kernel_are_compared_with_torch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = _bench(capsys, "linear-tiles")
    (choice,) = [row for row in rows if row["part"] == "linear choice"]
    tiles = [row for row in rows if row["part"] == "linear tile"]
    assert len(tiles) >= 2 * 4 and all(row["is_right"] for row in tiles)
    assert choice["measured"] == 2 and choice["present_us"] > 0
    assert choice["tile"] in [row["tile"] for row in tiles]
    assert choice["is_faster_than_torch"] == (choice["us"] < choice["torch_us"])


def test_products_with_codes_are_compared_with_torch(capsys: pytest.CaptureFixture[str]) -> None:
    rows = _bench(capsys, "kernels", "coded")
    assert {(row["codes"], row["rows"]) for row in rows} == {
        (codes, num_rows) for codes in ("int8", "int4") for num_rows in (2, 20)
    }
    assert all(row["is_right"] and row["rivals"]["torch"] > 0 for row in rows)


@pytest.mark.slow
def test_steps_with_codes_are_no_rows_of_the_goals(capsys: pytest.CaptureFixture[str]) -> None:
    rows = _bench(capsys, "steps", SMALL, "--points", "codes", "--quantization", "fp8")
    assert [row["part"] for row in rows] == ["load", "coded decode"]
    assert rows[1]["codes"] == "fp8" and rows[1]["tpot_ms"] > 0
    assert {verdict.word for verdict in verdicts(rows)} == {"not measured"}


def test_when_the_time_is_used_up_the_rest_is_noted_as_not_run(tmp_path: Path) -> None:
    assert main(["--tiny", "--minutes", "0", "--out", str(tmp_path), "--parts", "http,device"]) == 1
    failures = json.loads((tmp_path / "summary.json").read_text())["failures"]
    assert [failure["of"] for failure in failures] == ["device", "http"]
    assert all("--minutes" in failure["message"] for failure in failures)


def test_an_unknown_part_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--parts", "everything"]) == 2
    assert "choose from probe, device, compile" in capsys.readouterr().err


def test_a_kernel_that_is_wrong_is_a_failure(tmp_path: Path) -> None:
    run = Run(Record(tmp_path), part="small")
    run.note({"part": "kernel", "kernel": "embed", "error": 0.5, "is_right": False})
    assert "kernel=embed, error=0.5" in run.record.failures()[0]["message"]


@pytest.mark.parametrize(("name", "num_cases"), [("kernel-linear", 15), ("kernel-kv-write", 8)])
def test_a_rung_of_a_kernel_checks_it_against_torch(
    name: str, num_cases: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rung.main([name, "--tiny"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["is_right"] and row["num_cases"] == num_cases


def test_a_kernel_that_is_wrong_is_named_with_its_sizes_and_its_error() -> None:
    def make(error: float) -> Case:
        return Case(
            kernel="norm", at={"rows": 3}, calls=[], error=lambda: error, num_bytes=0, tolerances=5
        )

    def lost() -> Case:
        raise RuntimeError("no such tile")

    bench = Bench(tiny=True)  # 1e-5 of float32, five times
    assert rung.wrong_of(lambda: make(4e-5), "first", bench) == {}
    assert rung.wrong_of(lambda: make(0.5), "first", bench) == {"norm, rows 3": 0.5}
    assert rung.wrong_of(lambda: make(float("nan")), "first", bench) == {"norm, rows 3": "nan"}
    assert rung.wrong_of(lost, "first", bench) == {"first": "RuntimeError: no such tile"}


def test_a_goal_is_met_on_its_own_side_of_the_limit() -> None:
    at: dict[str, Any] = {"part": "decode", "model": LLAMA, "batch": 1, "context": 512}
    device = _device("NVIDIA H200", H200.copy, H200.matrix)
    for tpot_ms, rate, words in ((3.8, 3.9e12, ["met", "met"]), (4.0, 3.5e12, ["NOT MET"] * 2)):
        row = with_shares({**at, "tpot_ms": tpot_ms, "bytes_per_s": rate}, device)
        rows = [device, {**at, "context": 2048, "tpot_ms": 9.0}, row]
        assert [verdict.word for verdict in verdicts(rows)[:2]] == words
        assert f"{tpot_ms:.2f}" in table(rows)


def _device(name: str, copy: float, matrix: float) -> dict[str, Any]:
    rates = {"copy_bytes_per_s": copy, "matrix_flops_per_s": matrix}
    return {"part": "device", "name": name, **rates}


def test_a_goal_is_scaled_by_what_the_device_at_hand_measured_itself() -> None:
    at: dict[str, Any] = {"part": "decode", "model": LLAMA, "batch": 1, "context": 512}
    rows = [{**at, "tpot_ms": 5.2}, {"part": "ready", "model": LLAMA, "ready_s": 16.0}]
    h100 = _device("NVIDIA H100 80GB HBM3", H200.copy / 1.42, H200.matrix / 1.1)
    by_what = {verdict.goal.what: verdict for verdict in verdicts([h100, *rows])}
    decode, ready, prefill = (
        next(v for what, v in by_what.items() if what.startswith(name))
        for name in ("Llama-3.1-8B, batch 1", "ready", "TTFT")
    )
    # 0.81 of a decode step is the memory's, 0.88 of a prefill the matrix units', none of the start.
    assert decode.here.wanted == pytest.approx(3.9 * (1 + 0.81 * 0.42)) and decode.word == "met"
    assert decode.here.limit == pytest.approx(3.51 * 1.42)
    assert prefill.here.wanted == pytest.approx(30 * (1 + 0.07 * 0.42 + 0.88 * 0.1))
    assert prefill.here.limit == pytest.approx(18 * 1.1)
    assert ready.here.wanted == 15 and ready.word == "NOT MET"
    assert next(v for v in verdicts(rows) if v.goal is decode.goal).word == "NOT MET"


def test_the_table_of_goals_names_the_device_and_what_is_wanted_of_it() -> None:
    h100 = _device("NVIDIA H100 80GB HBM3", 3.0e12, H200.matrix)
    lines = table([h100, {"part": "offline", "model": LLAMA, "tokens_per_s": 9000.0}]).splitlines()
    assert "NVIDIA H100 80GB HBM3 (copy 3.00 TB/s, bf16 702 TF/s)" in lines[0]
    (line,) = [line for line in lines if line.startswith("offline benchmark, Llama-3.1-8B")]
    assert line.split()[-6:] == ["11,000", "tok/s", "8,936", "9,366", "9,000", "met"]


def test_flash_attentions_time_is_stated_over_ours() -> None:
    row = {"part": "kernel", "us": 100.0, "rivals": {"vLLM's FlashAttention 3": 90.0}}
    assert with_shares(row, {})["flash_attention_3_over_ours"] == pytest.approx(0.9)
