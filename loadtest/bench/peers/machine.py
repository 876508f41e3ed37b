"""What else the machine did while a server was measured. Reads /proc of Linux."""

import contextlib
import os
import platform
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_MAX_NAMED = 5
_MIN_NAMED_CORES = 0.005
# Ends with the process that started it, however that ends.
_BUSY = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """Processors that were busy on average, as 1.5 of 2. processes: of the others, the busiest.

    others: all that neither the server, this client nor --busy used; a process that began and ended
    meanwhile is in it without a name. stolen: a virtual machine waited for its host.
    """

    server: float
    client: float
    others: float
    stolen: float
    processes: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Process:
    name: str
    parent: int
    session: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """processes: by process id and start time, which no two processes share."""

    time_s: float
    busy_s: float
    stolen_s: float
    processes: dict[tuple[int, int], _Process]


class CpuMeter:
    """Measures from when it is made to `read`."""

    def __init__(self, server_pid: int, busy_pids: list[int]) -> None:
        self._server_pid, self._busy_pids = server_pid, busy_pids
        self._before = _snapshot()

    def read(self) -> CpuUse:
        before, after = self._before, _snapshot()
        parents = {pid: process.parent for (pid, _), process in after.processes.items()}
        used = dict.fromkeys(("server", "client", "busy"), 0.0)
        named: defaultdict[str, float] = defaultdict(float)
        for key, process in after.processes.items():
            earlier = before.processes.get(key)
            cpu_s = process.cpu_s - (earlier.cpu_s if earlier else 0.0)
            owner = self._owner(key[0], process, parents)
            if owner is None:
                named[process.name] += cpu_s
            else:
                used[owner] += cpu_s
        seconds = after.time_s - before.time_s
        cores = {name: cpu_s / seconds for name, cpu_s in used.items()}
        busy = (after.busy_s - before.busy_s) / seconds
        busiest = sorted(named, key=lambda name: -named[name])[:_MAX_NAMED]
        return CpuUse(
            server=cores["server"],
            client=cores["client"],
            others=max(0.0, busy - sum(cores.values())),
            stolen=(after.stolen_s - before.stolen_s) / seconds,
            processes={
                name: named[name] / seconds
                for name in busiest
                if named[name] / seconds >= _MIN_NAMED_CORES
            },
        )

    def _owner(self, pid: int, process: _Process, parents: dict[int, int]) -> str | None:
        if pid == os.getpid():
            return "client"
        if pid in self._busy_pids:
            return "busy"
        if process.session == self._server_pid:
            return "server"
        while pid > 1:  # a child may have begun a session of its own
            if pid == self._server_pid:
                return "server"
            pid = parents.get(pid, 0)
        return None


def is_supported() -> bool:
    return (_PROC / "stat").exists()


def processor_name() -> str:
    with contextlib.suppress(OSError):
        text = (_PROC / "cpuinfo").read_text()
        if match := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return match[1].strip()
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """Those that this process may use, and so the servers that it starts."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def busy_processes(*, is_busy: bool) -> Iterator[list[int]]:
    """One that computes without end on each core, or none; yields their process ids."""
    cores = sorted(os.sched_getaffinity(0)) if is_busy else []
    # Linux shares the CPU between sessions first: in this one, they would slow this client most.
    processes = [
        subprocess.Popen([sys.executable, "-c", _BUSY, str(core)], start_new_session=True)
        for core in cores
    ]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _snapshot() -> _Snapshot:
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    processes = {}
    for directory in _PROC.iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                stat = (directory / "stat").read_text(errors="replace")
                start, process = _parse(stat, ticks_per_s)
                processes[int(directory.name), start] = process
    # user, nice, system, idle, iowait, irq, softirq, steal: proc_stat(5)
    ticks = [int(text) for text in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:]]
    return _Snapshot(
        time_s=time.monotonic(),
        busy_s=sum(ticks[index] for index in (0, 1, 2, 5, 6)) / ticks_per_s,
        stolen_s=ticks[7] / ticks_per_s,
        processes=processes,
    )


def _parse(stat: str, ticks_per_s: int) -> tuple[int, _Process]:
    """The start time, and the process: proc_pid_stat(5). A name may have spaces and brackets."""
    head, _, tail = stat.rpartition(")")
    fields = tail.split()  # the third of the page is the first here
    cpu_s = (int(fields[11]) + int(fields[12])) / ticks_per_s
    name = head.partition("(")[2]
    return int(fields[19]), _Process(name, int(fields[1]), int(fields[3]), cpu_s)
