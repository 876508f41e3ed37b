"""The measuring tools run, check what they measure, and end with one JSON document."""

import json

import pytest

from penstock.engine.config import Dtype
from tests.bench import drafts_lookup, receive_rate, scheduler_step
from tests.bench.engine.cpu_prefill import cpu_prefill
from tests.bench.server import batching
from tests.bench.server.batching import Measured
from tests.support.paths import ROOT


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    summary: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return summary


def test_a_scheduling_step_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-seqs 8 --context 60 --num-steps 40 --num-rounds 1 --num-prompts 5"
    assert scheduler_step.main([*flags.split(), "--prompt-len", "70"]) == 0
    summary = last_json(capsys)
    assert summary["num_steps"] == 40
    assert 0 < summary["median_step_us"] <= summary["p99_step_us"]


@pytest.mark.slow
def test_looking_for_drafts_is_timed_beside_another_checkout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--streams", "1", "3", "--num-steps", "20", "--num-rounds", "2"]
    assert drafts_lookup.main([*flags, "--beside", str(ROOT)]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert len(rows) == 2 * len(drafts_lookup.CASES)
    assert all(row["here"] > 0 and row["beside"] > 0 for row in rows)


@pytest.mark.parametrize("client", ["penstock", "httpx"])
def test_the_client_receives_every_event_of_many_streams(
    client: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--num-streams", "20", "--num-tokens", "200", "--client", client]
    assert receive_rate.main(flags) == 0
    assert last_json(capsys)["num_events"] == 4000


def test_the_delay_of_arrival_times_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-streams", "5", "--num-tokens", "20", "--interval-ms", "1"]
    assert receive_rate.main(flags) == 0
    summary = last_json(capsys)
    assert 0 < summary["p50_delay_us"] <= summary["p99_delay_us"] < 1e6
    assert summary["duration_s"] >= 0.02


def test_the_batching_table_shows_medians_and_ranges() -> None:
    rounds = []
    for figure in (100.0, 300.0, 200.0):
        summary = {key: figure / 10 for _, key, _ in batching.COLUMNS}
        measured = Measured(burst={"output_throughput": figure * 10}, arrivals=summary)
        rounds.append(dict.fromkeys(batching.MODES, measured))
    lines = batching.table(rounds).splitlines()
    assert lines[0].startswith(
        "| batching | capacity, output tokens/s | output tokens/s | TTFT p50"
    )
    assert lines[2].startswith("| continuous | 2,000 (1,000-3,000) | 20.0 (10.0-30.0) |")
    assert [line.split()[1] for line in lines[2:]] == ["continuous", "dynamic", "static"]


@pytest.mark.slow
def test_a_prefill_step_is_compared_with_products_of_torch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cpu_prefill(Dtype.BFLOAT16, num_threads=1, num_rows=16, rounds=1)
    summary = last_json(capsys)
    assert summary["gflops"] > 0
    assert summary["ratio"] == pytest.approx(summary["gflops"] / summary["torch_gflops"], rel=0.05)
