"""A process of the GPU suite: its rows, its log, and its end in time."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.bench.gpu import processes
from tests.bench.gpu.memory import GpuMemory
from tests.bench.gpu.processes import Process, Row
from tests.bench.gpu.record import Log

# Prints a row, half a row and a line, ignores SIGTERM, and stays.
HANGS = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('{"a": 1}\\n{"b": \\nsome words', flush=True)
print("waiting for the device", file=sys.stderr, flush=True)
time.sleep(600)
"""


class Runner:
    def __init__(self, folder: Path) -> None:
        self.rows: list[Row] = []
        self.file = folder / "log.txt"
        self.log = Log(self.file)

    def start(self, code: str, *, limit_s: float = 60, stall_s: float | None = None) -> Process:
        command = [sys.executable, "-c", code]
        return Process(command, self.rows.append, self.log, limit_s=limit_s, stall_s=stall_s)


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


@pytest.mark.slow
def test_rows_are_noted_while_the_process_runs(runner: Runner) -> None:
    process = runner.start(HANGS, limit_s=3)
    ends_s = time.monotonic() + 30
    while not runner.rows and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert process.status is None and runner.rows == [{"a": 1}]
    process.wait()


@pytest.mark.slow
def test_a_process_that_ignores_sigterm_is_killed_and_its_rows_count(runner: Runner) -> None:
    ended = runner.start(HANGS, limit_s=1).wait()
    assert ended.problem and ended.problem.splitlines()[0] == (
        "stopped after 1 s: waiting for the device"
    )
    assert runner.rows == [{"a": 1}]
    assert runner.file.read_text() == "waiting for the device\n"


def test_a_process_that_nothing_ends_is_left_behind(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_TERM_S", "_KILL_S", "_READ_S"):
        monkeypatch.setattr(processes, name, 0.1)
    kill = os.killpg
    monkeypatch.setattr(os, "killpg", lambda pid, number: None)  # as in a driver that hangs
    process = runner.start(HANGS, limit_s=1)
    ended = process.wait()
    assert "left behind" in (ended.problem or "") and ended.seconds < 20
    kill(process._process.pid, signal.SIGKILL)
    process._process.wait()
    for reader in process._readers:
        reader.join()


@pytest.mark.slow
def test_without_a_row_for_long_a_process_is_ended(runner: Runner) -> None:
    ended = runner.start(HANGS, limit_s=600, stall_s=1).wait()
    assert "1 of them without a result" in (ended.problem or "")


def test_what_a_process_has_started_ends_with_it(runner: Runner) -> None:
    code = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', "
        "'import time; time.sleep(600)']); print('{\"pid\": %d}' % child.pid)"
    )
    runner.start(code).wait()
    (row,) = runner.rows
    ends_s = time.monotonic() + 20
    while _is_running(row["pid"]) and time.monotonic() < ends_s:
        time.sleep(0.05)
    assert not _is_running(row["pid"])


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # its parent is gone, so it may never be reaped


def test_an_abort_is_named_with_the_last_line_of_the_log(runner: Runner) -> None:
    code = "import os, sys; print('illegal address', file=sys.stderr, flush=True); os.abort()"
    problem = runner.start(code).wait().problem
    assert problem and problem.splitlines()[0] == "it was ended by SIGABRT: illegal address"


def _smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts an nvidia-smi on the path; $N is how many times it was called."""
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\necho x >> {folder}/calls\nN=$(wc -l < {folder}/calls)\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_part_starts_when_the_memory_of_the_one_before_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _smi(tmp_path, "case $N in 1) echo 500;; 2|3) echo 70000;; *) echo 700;; esac", monkeypatch)
    memory = GpuMemory(Log(tmp_path / "log.txt"))
    assert memory.wait_until_free(30) is None
    assert len((tmp_path / "calls").read_text().split()) == 4


def test_memory_that_stays_in_use_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _smi(tmp_path, "case $N in 1) echo 500;; *) echo 70000;; esac", monkeypatch)
    memory = GpuMemory(Log(tmp_path / "log.txt"))
    assert memory.wait_until_free(0.1) == "70000 MB of the GPU's memory are still in use"
