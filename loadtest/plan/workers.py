"""Searches of many candidates, in processes that each take the next one."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path

from penstock.loadtest.plan.candidates import Candidate
from penstock.loadtest.plan.load import Load
from penstock.loadtest.plan.search import Searched, search
from penstock.loadtest.plan.targets import Targets
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.loadtest.workload.token_counter import tokenizer_counter


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The settings that all searches share. tokenizer: counts a file's texts; None: an estimate."""

    workload: WorkloadConfig
    seconds: float
    tokenizer: Path | None
    targets: Targets
    precision: float

    def load(self) -> Load:
        count = None if self.tokenizer is None else tokenizer_counter(self.tokenizer)
        return Load(self.workload, self.seconds, count)

    def run(self, candidate: Candidate, load: Load) -> Searched:
        return search(candidate, load, self.targets, precision=self.precision)


_task: Task | None = None
_load: Load | None = None  # made once in each process: its prompts take seconds


def _begin(task: Task) -> None:
    global _task, _load
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _task, _load = task, task.load()


def _end_with_parent() -> None:
    """A pool's processes hold the pipe that they read from open for each other, so they would wait
    for a parent that was killed for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _search(candidate: Candidate) -> Searched:
    assert _task is not None and _load is not None
    return _task.run(candidate, _load)


def search_all(
    task: Task,
    candidates: Sequence[Candidate],
    load: Load,
    num_processes: int,
    on_done: Callable[[int, Searched], None],
) -> list[Searched]:
    """Searches in the order of the candidates. load: used where one process is enough. on_done:
    called after each, with the number of those that have ended."""
    if num_processes == 1 or len(candidates) == 1:
        searched = []
        for number, candidate in enumerate(candidates, start=1):
            searched.append(task.run(candidate, load))
            on_done(number, searched[-1])
        return searched
    # A fork would copy the locks of threads that torch has started.
    pool = ProcessPoolExecutor(
        num_processes, mp_context=get_context("spawn"), initializer=_begin, initargs=(task,)
    )
    try:
        futures = [pool.submit(_search, each) for each in candidates]
        for number, future in enumerate(as_completed(futures), start=1):
            on_done(number, future.result())
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
