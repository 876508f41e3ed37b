"""Searches of many candidates, in processes that each take the next one."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
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
    """What every search has in common. tokenizer: of a file's texts; None for an estimate."""

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
    task: Task, candidates: Sequence[Candidate], load: Load, num_processes: int
) -> Iterator[Searched]:
    """As they end. load: used where one process is enough."""
    if num_processes == 1 or len(candidates) == 1:
        for candidate in candidates:
            yield task.run(candidate, load)
        return
    # A fork would copy the locks of threads that torch has started.
    pool = ProcessPoolExecutor(
        num_processes, mp_context=get_context("spawn"), initializer=_begin, initargs=(task,)
    )
    try:
        for future in as_completed([pool.submit(_search, each) for each in candidates]):
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def in_order(
    candidates: Sequence[Candidate],
    results: Iterator[Searched],
    on_done: Callable[[int, Searched], None],
) -> list[Searched]:
    """In the order of the candidates. on_done: called with the number of those that have ended."""
    done: dict[str, Searched] = {}
    for result in results:
        done[str(result.candidate)] = result
        on_done(len(done), result)
    return [done[str(candidate)] for candidate in candidates]
