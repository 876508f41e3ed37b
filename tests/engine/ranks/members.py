"""Processes that are the ranks of a group, and run a function of this package."""

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from penstock.engine.native.library import load_ranks_library
from penstock.engine.ranks.board import Board, board_memory
from penstock.engine.ranks.layout import RankLayout
from penstock.engine.ranks.rendezvous import Rendezvous, rendezvous_memory
from penstock.engine.ranks.shared_memory import (
    RankMemory,
    SharedMemoryGroup,
    group_bytes,
    shared_memory,
)
from penstock.engine.ranks.torch_ranks import TorchRanks
from tests.support.paths import ROOT


@contextmanager
def members(
    function: str, size: int, *, backend: str = "shm", timeout_s: float = 30.0, num_stages: int = 1
) -> Iterator[list["subprocess.Popen[str]"]]:
    """function: MODULE:NAME; what it returns is the process's output. backend: shm, for a function
    of the group; or gloo, for one of `TorchRanks`, in so many stages."""
    memory = [rendezvous_memory(), board_memory(size)]
    if backend == "shm":
        memory = [shared_memory(group_bytes(load_ranks_library(), size))]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine.ranks.members", function, backend,
             *map(str, (rank, size, num_stages, timeout_s, *memory))],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            pass_fds=memory,
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
        for descriptor in memory:
            os.close(descriptor)


def outputs(processes: list["subprocess.Popen[str]"]) -> list[Any]:
    """What each returned."""
    return [msgspec.json.decode(process.communicate(timeout=60)[0]) for process in processes]


def main() -> None:
    name, backend, *numbers = sys.argv[1:]
    rank, size, num_stages, timeout_s, *memory = map(float, numbers)
    module, _, function = name.partition(":")
    given: SharedMemoryGroup | TorchRanks
    if backend == "shm":
        library, layout = load_ranks_library(), RankLayout(int(size))
        shared = RankMemory(library, int(memory[0]), layout, int(rank), timeout_s)
        given = SharedMemoryGroup(shared, range(layout.size))
    else:
        rendezvous, board = Rendezvous(int(memory[0]), int(size)), Board(int(memory[1]))
        layout, cpu = RankLayout(int(size // num_stages), int(num_stages)), torch.device("cpu")
        given = TorchRanks(rendezvous, int(rank), cpu, board, layout, alone=False)
        given.wait_at_most(timeout_s)
    made = getattr(importlib.import_module(module), function)(given)
    sys.stdout.write(msgspec.json.encode(made).decode())


if __name__ == "__main__":
    main()
