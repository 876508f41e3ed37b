"""What else the machine does is told apart from the server that is measured."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.bench.in_turns.machine import (
    busy_processes,
    cpu_use,
    num_cores,
    processor_name,
    snapshot,
)
from tests.support.serving import wait_until

# The one that computes is a child in a session of its own.
_PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "while True: pass"], start_new_session=True)
"""


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_server_with_its_children_and_busy_processes_are_no_others() -> None:
    server = subprocess.Popen([sys.executable, "-c", _PARENT], start_new_session=True)
    try:
        wait_until(lambda: children(server.pid))
        (child,) = children(server.pid)
        with busy_processes(is_busy=True) as busy_pids:
            ticks = {pid: cpu_ticks(pid) for pid in (child, *busy_pids)}
            before = snapshot()
            wait_until(lambda: all(cpu_ticks(pid) >= ticks[pid] + 10 for pid in ticks))
            after = snapshot()
        os.kill(child, signal.SIGKILL)
    finally:
        server.kill()
        server.wait()
    used = cpu_use(before, after, server.pid, busy_pids)
    without_server = cpu_use(before, after, -1, busy_pids)
    without_busy = cpu_use(before, after, server.pid, [])
    assert used.server > 0
    assert without_server.others > used.others
    assert without_busy.others > used.others


def test_a_busy_process_runs_on_each_core_and_ends_after_the_load() -> None:
    with busy_processes(is_busy=True) as pids:
        assert len(pids) == num_cores()
        wait_until(lambda: all(len(os.sched_getaffinity(pid)) == 1 for pid in pids))
        cores = set().union(*(os.sched_getaffinity(pid) for pid in pids))
        assert cores == os.sched_getaffinity(0)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with busy_processes(is_busy=False) as pids:
        assert pids == []


def test_the_processor_has_a_name() -> None:
    assert processor_name()
