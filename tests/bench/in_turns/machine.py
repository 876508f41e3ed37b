"""What else the machine did while a server was measured. Reads /proc of Linux."""

import contextlib
import os
import platform
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_MAX_NAMED = 5
_MIN_NAMED_CORES = 0.005
_MIN_SECONDS = 0.01  # a tick: the kernel counts no less
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
class Snapshot:
    """CPU time until now. elapsed_s: of each core, idle or not.

    processes: by process id and start time, which no two processes share.
    """

    elapsed_s: float
    busy_s: float
    stolen_s: float
    processes: dict[tuple[int, int], _Process]


def cpu_use(before: Snapshot, after: Snapshot, server_pid: int, busy_pids: list[int]) -> CpuUse:
    """server_pid: also of its session."""
    parents = {pid: process.parent for (pid, _), process in after.processes.items()}
    used = dict.fromkeys(("server", "client", "busy"), 0.0)
    named: defaultdict[str, float] = defaultdict(float)
    seconds = max(after.elapsed_s - before.elapsed_s, _MIN_SECONDS)
    for key, process in after.processes.items():
        earlier = before.processes.get(key)
        cores = (process.cpu_s - (earlier.cpu_s if earlier else 0.0)) / seconds
        pid = key[0]
        if pid == os.getpid():
            used["client"] += cores
        elif pid in busy_pids:
            used["busy"] += cores
        elif process.session == server_pid or _descends(pid, server_pid, parents):
            used["server"] += cores
        else:
            named[process.name] += cores
    busiest = sorted(named, key=lambda name: -named[name])[:_MAX_NAMED]
    return CpuUse(
        server=used["server"],
        client=used["client"],
        others=max(0.0, (after.busy_s - before.busy_s) / seconds - sum(used.values())),
        stolen=(after.stolen_s - before.stolen_s) / seconds,
        processes={name: named[name] for name in busiest if named[name] >= _MIN_NAMED_CORES},
    )


def cores_of(before: Snapshot, after: Snapshot, leader: int) -> float:
    """Of a process with all that it has started, on average. leader: also the id of its session."""
    parents = {pid: process.parent for (pid, _), process in after.processes.items()}
    cpu_s = 0.0
    for key, process in after.processes.items():
        if process.session == leader or _descends(key[0], leader, parents):
            earlier = before.processes.get(key)
            cpu_s += process.cpu_s - (earlier.cpu_s if earlier else 0.0)
    return cpu_s / max(after.elapsed_s - before.elapsed_s, _MIN_SECONDS)


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    """A child may have begun a session of its own."""
    while pid > 1:
        if pid == ancestor:
            return True
        pid = parents.get(pid, 0)
    return False


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


def snapshot() -> Snapshot:
    processes = {}
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    for directory in _PROC.iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                stat = (directory / "stat").read_text(errors="replace")
                start, process = _parse(stat, ticks_per_s)
                processes[int(directory.name), start] = process
    first, *others = (_PROC / "stat").read_text().splitlines()
    num_cores = sum(line.startswith("cpu") for line in others)
    # user, nice, system, idle, iowait, irq, softirq, steal: proc_stat(5)
    seconds = [int(text) / ticks_per_s for text in first.split()[1:9]]
    return Snapshot(
        # Not by a clock: between two readings, a busy machine may run another program.
        elapsed_s=sum(seconds) / num_cores,
        busy_s=sum(seconds[index] for index in (0, 1, 2, 5, 6)),
        stolen_s=seconds[7],
        processes=processes,
    )


def _parse(stat: str, ticks_per_s: int) -> tuple[int, _Process]:
    """The start time, and the process: proc_pid_stat(5). A name may have spaces and brackets."""
    head, _, tail = stat.rpartition(")")
    fields = tail.split()  # the third of the page is the first here
    cpu_s = (int(fields[11]) + int(fields[12])) / ticks_per_s
    name = head.partition("(")[2]
    return int(fields[19]), _Process(name, int(fields[1]), int(fields[3]), cpu_s)
