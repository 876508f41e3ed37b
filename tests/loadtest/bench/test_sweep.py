"""The sweep finds a limit that is known; the whole command, against a server paced by the clock."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.loadtest.bench.cli import main
from penstock.loadtest.bench.sweep import search, wilson_interval
from penstock.loadtest.report import plots
from tests.support.paths import ROOT
from tests.support.serving import MODEL, RunningServer, running_server, wait_until
from tests.support.sharegpt import ANSWER, sharegpt
from tests.support.timing import Disturbance

STEP_MS = 20.0
FEW = ["--num-prompts", "4", "--random-input-len", "4", "--random-output-len", "5"]


@settings(max_examples=60)
@given(limit=st.floats(0.1, 500.0), start=st.floats(0.5, 20.0))
def test_a_search_brackets_the_limit(limit: float, start: float) -> None:
    rates: list[float] = []

    async def measure(rate: float) -> bool:
        rates.append(rate)
        return rate <= limit

    bracket, is_complete = asyncio.run(search(measure, start, 0.05))
    assert is_complete and len(rates) < 40
    assert bracket.missed is not None and bracket.missed > limit
    if bracket.met is None:
        assert limit < start / 2**5
    else:
        assert bracket.met <= limit and bracket.missed <= bracket.met * 1.05
        assert rates.count(bracket.met) == 2  # once found, once confirmed


def test_a_rate_that_passed_by_chance_is_not_the_result() -> None:
    lucky = iter([True])

    async def measure(rate: float) -> bool:
        return rate <= 10 or (rate <= 12 and next(lucky, False))

    bracket, _ = asyncio.run(search(measure, 12.0, 0.05))
    assert bracket.met is not None and 9 < bracket.met <= 10


def test_an_interrupted_search_returns_what_it_knows() -> None:
    async def measure(rate: float) -> bool | None:
        return True if rate < 5 else None

    bracket, is_complete = asyncio.run(search(measure, 1.0, 0.05))
    assert (bracket.met, bracket.missed, is_complete) == (4.0, None, False)


def test_the_interval_of_a_share_is_wilsons() -> None:
    # 10 of 100, from Agresti and Coull 1998: 5.5 % to 17.4 %.
    assert wilson_interval(10, 100) == pytest.approx((0.0552, 0.1744), abs=1e-3)
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(
        "--scripted-step-ms", str(STEP_MS), "--max-num-seqs", "4", "--served-model-name", MODEL
    ) as server:
        yield server


@pytest.fixture
def url(server: RunningServer) -> str:
    return server.url


def bench(url: str, *flags: str) -> int:
    common = ["--base-url", url, "--random-input-len", "8", "--random-output-len", "10"]
    return main([*common, "--ignore-eos", *flags])


def printed_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(capsys.readouterr().out)
    return summary


def test_a_paced_server_has_the_tpot_of_its_steps(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Disturbance() as disturbance:
        assert bench(url, "--num-prompts", "8", "--max-concurrency", "4", "--json") == 0
    summary = printed_json(capsys)
    withheld_ms = disturbance.tolerance_s(0.0) * 1e3
    assert STEP_MS * 0.9 < summary["median_tpot_ms"] < STEP_MS * 1.1 + withheld_ms
    # A request waits for the step that runs, then for its own.
    assert STEP_MS * 0.5 < summary["median_ttft_ms"] < STEP_MS * 4 + withheld_ms
    expected_ms = summary["mean_ttft_ms"] + 9 * summary["mean_tpot_ms"]
    assert summary["mean_e2el_ms"] == pytest.approx(expected_ms, rel=0.01)
    assert summary["total_output_tokens"] == 80


@pytest.mark.slow
def test_a_sweep_finds_the_rate_that_the_servers_concurrency_allows(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """4 places, each held for 10 steps of 20 ms or a little more: 20 requests a second at most."""
    report = tmp_path / "sweep.html"
    with Disturbance() as disturbance:
        status = bench(
            url,
            *("--sweep", "--sweep-seconds", "0.3", "--sweep-precision", "0.5"),
            *("--request-rate", "10", "--goodput", "ttft:150", "--sweep-goodput-ratio", "0.8"),
            *("--report", str(report), "--save-result", "--result-dir", str(tmp_path)),
            *("--burstiness", "50"),
        )
    printed = capsys.readouterr().out
    (saved,) = tmp_path.glob("*.json")
    summary = json.loads(saved.read_text())
    assert status == 0
    # A server that is kept from running for long misses its target at lower rates too.
    assert (5 if disturbance.longest_s < 0.02 else 0.3) <= summary["max_request_rate"] <= 30
    assert summary["missed_request_rate"] <= summary["max_request_rate"] * 1.5 + 1e-9
    assert f"the highest rate that meets the SLO is {summary['max_request_rate']:.2f}" in printed
    assert "Time to First Token against throughput" in report.read_text()


@pytest.mark.slow
def test_a_report_has_every_figure_and_loads_nothing(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, pictures = tmp_path / "a" / "report.html", tmp_path / "plots"
    flags = ["--report", str(report), "--plot-dir", str(pictures), "--max-concurrency", "2"]
    assert bench(url, "--num-prompts", "6", *flags) == 0
    text = report.read_text()
    assert text.count("<svg") == text.count("</svg>") == 7
    assert not re.search(r"(src|href)=|url\(|@import|<script|https?://", text)
    assert not re.search(r"nan|inf\b", "".join(re.findall(r"<svg.*?</svg>", text)))
    # Six bars of waiting for the first token, six of decoding, four that had to wait for a place.
    assert text.count("<rect") >= 16
    names = {path.name for path in pictures.iterdir()}
    assert {"ttft-cdf.png", "timeline.png", "tokens-over-time.png"} <= names and len(names) == 7
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.iterdir())


def test_without_matplotlib_the_error_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert main(["--plot-dir", str(tmp_path)]) == 2
    assert "pip install 'penstock[plot]'" in capsys.readouterr().err


def test_custom_messages_reach_the_chat_endpoint(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "custom.jsonl"
    line = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 3}
    path.write_text(f"{json.dumps(line)}\n" * 4)
    flags = ["--dataset-name", "custom", "--dataset-path", str(path), "--backend", "openai-chat"]
    assert bench(url, *flags, "--json") == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert (summary["completed"], summary["total_output_tokens"]) == (4, 12)
    assert summary["num_prompts"] == 4 and "the file has 4 requests" in captured.err


def test_mooncake_blocks_are_found_in_the_servers_prefix_cache(
    server: RunningServer, tmp_path: Path
) -> None:
    line = {"timestamp": 0, "input_length": 1024, "output_length": 2, "hash_ids": [1, 2]}
    other = line | {"hash_ids": [1, 3]}
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (line, other, line)))
    before = server.metric("prefix_hit_tokens_total")
    flags = ["--dataset-name", "mooncake", "--dataset-path", str(path)]
    assert bench(server.url, *flags, "--max-concurrency", "1", "--num-warmups", "0") == 0
    hits = server.metric("prefix_hit_tokens_total") - before
    # All of the block they share, and of the whole prompt all but the last block of the cache.
    assert 512 + 1024 - 64 <= hits <= 512 + 1024


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sweep"], "--sweep requires the SLO"),
        (["--sweep", "--goodput", "ttft:5", "--sweep-seconds", "0"], "--sweep-seconds is 0"),
        (["--sweep", "--goodput", "ttft:5", "--sweep-goodput-ratio", "2"], "must be in (0, 1]"),
        (["--sweep", "--goodput", "ttft:5", "--save-detailed"], "remove --save-detailed"),
        (["--ramp-up-strategy", "linear"], "a ramp requires"),
        (["--burstiness", "0"], "--burstiness is 0"),
        (["--trace-speedup", "-1"], "--trace-speedup is -1"),
        (["--backend", "chat", "--endpoint", "/v1/completions"], "are different APIs"),
        (["--dataset-name", "azure"], "requires --dataset-path"),
    ],
)
def test_contradictory_flags_get_an_error_message(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    assert message in capsys.readouterr().err


def test_a_ramp_ends_faster_than_it_starts(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    flags = "--num-prompts 30 --ramp-up-strategy linear --ramp-up-start-rps 10 --burstiness 100"
    saved = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path)]
    end = ["--ramp-up-end-rps", "60", "--result-filename", path.name]
    assert bench(url, *flags.split(), *saved, *end, "--random-output-len", "1") == 0
    result = json.loads(path.read_text())
    starts = result["start_times"]
    assert (starts[10] - starts[0]) > 1.5 * (starts[-1] - starts[-11])
    assert (result["ramp_up_strategy"], result["ramp_up_end_rps"]) == ("linear", 60.0)


def test_the_server_counts_tokens_without_a_tokenizer(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sharegpt(tmp_path / "s.json", num=4)
    argv = ["--base-url", server.url, "--dataset-name", "sharegpt", "--dataset-path", str(path)]
    save = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--ignore-eos"]
    assert main([*argv, *save, "--num-prompts", "50", "--result-filename", "r.json"]) == 0
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["token_lengths"] == "server"
    reply = server.post("/tokenize", {"prompt": ANSWER})
    assert min(saved["output_lens"]) == reply.json()["count"]
    assert "the file has 4 requests" in capsys.readouterr().err


def test_an_unknown_model_is_reported_with_the_known_ones(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--base-url", server.url, *FEW, "--model", "nope"]) == 1
    printed = capsys.readouterr().err
    (line,) = [line for line in printed.splitlines() if "seed" not in line]
    assert "a warm-up request failed: HTTP 404" in line
    assert line.endswith(f"; the server lists {MODEL}")


def test_ctrl_c_prints_and_reports_the_results_so_far(
    server: RunningServer, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "penstock", "bench", "--base-url", server.url, "--json"]
    command += ["--report", str(tmp_path / "r.html")]
    command += ["--num-prompts", "500", "--random-input-len", "4", "--random-output-len", "5"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs, of which this may be one, ignore it.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        # All places are taken: the warm-up, of one request, is over.
        wait_until(lambda: server.metric("running_sequences") == 4, timeout_s=30)
        time.sleep(0.5)
    finally:
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "of 500 requests had ended" in errors and "Traceback" not in errors
    summary = json.loads(out)
    assert summary["completed"] >= 4 and summary["is_interrupted"]
    assert "of 500 requests had ended" in (tmp_path / "r.html").read_text()
