"""Finds the highest rate at which a candidate meets the targets, and how it does below that rate:
for many candidates in processes that each take the next one."""

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path

from penstock.loadtest.plan.candidates import Candidate
from penstock.loadtest.plan.probe import Point, Targets, probe
from penstock.loadtest.simulate.simulation import Plan, as_ids, simulate
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.loadtest.workload.token_counter import (
    TokenCounter,
    estimate_tokens,
    tokenizer_counter,
)
from penstock.loadtest.workload.workload import TimedRequest, make_requests

# Fewer say nothing of a 99th percentile.
MIN_REQUESTS = 200
# Ids below it take no memory of their own in Python; which ids a prompt has changes nothing here.
_VOCAB_SIZE = 256
# The next probe is often of a somewhat higher rate, and making all prompts again takes seconds.
_SPARE = 1.35


class Load:
    """config: lengths and prompts; of a trace without a rate, its own arrivals, else Poisson ones.
    seconds: of each probe, if that is MIN_REQUESTS or more."""

    def __init__(
        self, config: WorkloadConfig, seconds: float, count: TokenCounter = estimate_tokens
    ) -> None:
        self._config = replace(
            config,
            vocab_size=min(config.vocab_size, _VOCAB_SIZE),
            request_rate=math.inf if config.follows_trace else 1.0,
        )
        self._count = count
        self.seconds = seconds
        self._requests: list[TimedRequest] = []
        self._is_whole = False  # a file has no more

    def own_rate(self) -> float:
        """The mean rate of the trace's own arrivals."""
        self._make(1_000_000)
        return self._mean_rate()

    def at(self, rate: float, seconds: float | None = None) -> list[TimedRequest]:
        """Requests of so many seconds at this mean rate, in order of arrival."""
        num = max(MIN_REQUESTS, math.ceil(rate * (seconds or self.seconds)))
        if num > len(self._requests) and not self._is_whole:
            self._make(math.ceil(_SPARE * num))
        factor = self._mean_rate() / rate
        return [
            replace(request, arrival_s=request.arrival_s * factor)
            for request in self._requests[:num]
        ]

    def _mean_rate(self) -> float:
        """1 but for a trace."""
        if not self._config.follows_trace:
            return 1.0
        span_s = self._requests[-1].arrival_s - self._requests[0].arrival_s
        return (len(self._requests) - 1) / max(span_s, 1e-9) if len(self._requests) > 1 else 1.0

    def _make(self, num: int) -> None:
        config = replace(self._config, num_prompts=num)
        self._requests = as_ids(make_requests(config, self._count), config)
        self._is_whole = len(self._requests) < num


# Below the limit, for the front of throughput against speed: shares of the highest rate.
SHARES = (0.25, 0.5, 0.75)
# A first guess is the throughput with all slots taken; a load with targets carries less.
_START_SHARE = 0.8
_MAX_GUESSED = 1200  # requests of that guess
# It is good, so that the first step from it is small; where targets are tight it may be far off.
_FIRST_FACTOR, _MAX_FACTOR, _MAX_RATIO = 1.3, 4.0, 4000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """points: in the order of the search. limit: the highest rate that met the targets; None where
    no rate did, nor where none missed them."""

    candidate: Candidate
    points: list[Point]
    limit: float | None

    @property
    def best(self) -> Point | None:
        """At the limit."""
        return next((point for point in self.points if point.rate == self.limit), None)


def find_limit(
    meets_targets: Callable[[float], bool], start: float, precision: float
) -> tuple[float | None, float | None]:
    """Raises or lowers the rate until one meets the targets and one does not, in steps that grow,
    then bisects, until the two are within the precision, relative to the lower one.

    Returns the highest rate that met them and the lowest one that did not; None where there is
    none.
    """
    met = missed = None
    rate, factor = start, _FIRST_FACTOR
    while start / _MAX_RATIO <= rate <= start * _MAX_RATIO:
        is_met = meets_targets(rate)
        if is_met:
            met = rate
        else:
            missed = rate
        if met is None or missed is None:
            rate = rate * factor if is_met else rate / factor
            factor = min(factor * factor, _MAX_FACTOR)
        elif missed <= met * (1 + precision):
            break
        else:
            rate = math.sqrt(met * missed)
    return met, missed


def search(candidate: Candidate, load: Load, targets: Targets, precision: float) -> Searched:
    """Probes at rates that close in on the limit, and at SHARES of it."""

    points: list[Point] = []

    def meets_targets(rate: float) -> bool:
        points.append(probe(candidate, load.at(rate), rate, targets))
        return points[-1].is_met

    limit, _ = find_limit(meets_targets, _first_rate(candidate, load), precision)
    if limit is not None:
        points += [probe(candidate, load.at(s * limit), s * limit, targets) for s in SHARES]
    return Searched(candidate=candidate, points=points, limit=limit)


def _first_rate(candidate: Candidate, load: Load) -> float:
    server = candidate.server
    num = min(_MAX_GUESSED, 3 * server.scheduler.max_num_seqs)
    requests = [replace(request, arrival_s=0.0) for request in load.at(1.0)[:num]]
    concurrency = server.scheduler.max_num_seqs
    plan = Plan(server=server, max_concurrency=concurrency, seed=None)
    observed = simulate(plan, requests).observed
    return _START_SHARE * max(1, len(observed.completed)) / observed.duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The settings that all searches share. tokenizer: counts a file's texts; None: an estimate."""

    workload: WorkloadConfig
    seconds: float
    tokenizer: Path | None
    targets: Targets
    precision: float

    def load(self) -> Load:
        return Load(self.workload, self.seconds, tokenizer_counter(self.tokenizer))


# Of each process, with a load that is made once: its prompts take seconds.
_searcher: Callable[[Candidate], Searched]


def _begin(task: Task) -> None:
    global _searcher
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _searcher = partial(search, load=task.load(), targets=task.targets, precision=task.precision)


def _end_with_parent() -> None:
    """A pool's processes hold the pipe that they read from open for each other, so they would wait
    for a parent that was killed for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _search(candidate: Candidate) -> Searched:
    return _searcher(candidate)


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
            searched.append(search(candidate, load, task.targets, task.precision))
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
