"""Processes that are the ranks of a group, and run a function of this package."""

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from penstock.engine.native.library import load_ranks_library
from penstock.engine.ranks.group import Group
from penstock.engine.ranks.shared_memory import SharedMemoryGroup, shared_memory
from penstock.engine.ranks.torch_group import TorchGroup
from tests.support.paths import ROOT


@contextmanager
def members(
    function: str, size: int, directory: Path, *, backend: str = "shm", timeout_s: float = 30.0
) -> Iterator[list["subprocess.Popen[str]"]]:
    """function: MODULE:NAME, called with the group; what it returns is the process's output."""
    descriptor = shared_memory(load_ranks_library(), size) if backend == "shm" else -1
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine.ranks.members", function, backend,
             str(descriptor), str(rank), str(size), str(timeout_s), str(directory)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            pass_fds=[descriptor] if descriptor >= 0 else [],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()
        if descriptor >= 0:
            os.close(descriptor)


def outputs(processes: list["subprocess.Popen[str]"]) -> list[Any]:
    """What each returned."""
    return [msgspec.json.decode(process.communicate(timeout=60)[0]) for process in processes]


def main() -> None:
    name, backend, descriptor, rank, size, timeout_s, directory = sys.argv[1:]
    module, _, function = name.partition(":")
    group: Group
    if backend == "shm":
        group = SharedMemoryGroup(
            load_ranks_library(), int(descriptor), int(rank), int(size), timeout_s=float(timeout_s)
        )
    else:
        group = TorchGroup(
            backend, Path(directory), int(rank), int(size), timeout_s=float(timeout_s)
        )
    made = getattr(importlib.import_module(module), function)(group)
    sys.stdout.write(msgspec.json.encode(made).decode())


if __name__ == "__main__":
    main()
