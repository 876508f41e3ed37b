"""Replays a workload: sends each request when it is due, and collects what was observed.

A request is timed from when it is due, connecting included, so a server that is slow to accept
cannot look fast.
"""

import asyncio
import contextlib
import gc
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from penstock.loadtest.bench.http_target import HttpTarget
from penstock.loadtest.report.report import Replay, RequestResult
from penstock.loadtest.workload.workload import TimedRequest

T = TypeVar("T")
# Latest responses whose median TTFT the progress bar shows.
NUM_RECENT = 1000
WIDTH = 20
# A terminal should be seen to move; a log file should stay short.
TERMINAL_INTERVAL_S, LOG_INTERVAL_S = 0.2, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayState:
    """How far a replay is. ttft_s: median of the latest responses; None before the first."""

    num_done: int
    num_failed: int
    num_tokens: int
    num_open: int
    ttft_s: float | None


class Progress:
    """A bar on stderr for a replay of `total` requests: redrawn in place on a terminal, else a new
    line every 10 s. Stop it by cancelling `watch`."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._is_terminal = sys.stderr.isatty()

    async def watch(self, state: Callable[[], ReplayState]) -> None:
        start_s = time.monotonic()
        try:
            while True:
                await asyncio.sleep(TERMINAL_INTERVAL_S if self._is_terminal else LOG_INTERVAL_S)
                self._show(state(), time.monotonic() - start_s)
        finally:
            if self._is_terminal:
                self._show(state(), time.monotonic() - start_s)
                print(file=sys.stderr)

    def _show(self, state: ReplayState, elapsed_s: float) -> None:
        start, end = ("\r", "\x1b[K") if self._is_terminal else ("", "\n")
        text = progress_line(state, self._total, elapsed_s)
        print(start + text, end=end, file=sys.stderr, flush=True)


def progress_line(state: ReplayState, total: int, elapsed_s: float) -> str:
    done = state.num_done
    filled = WIDTH * done // total
    parts = [
        f"{'█' * filled}{'·' * (WIDTH - filled)} {done}/{total}",
        f"{done / elapsed_s:.1f} req/s",
        f"{state.num_tokens / elapsed_s:.0f} tok/s",
        f"{state.num_open} in flight",
    ]
    if state.ttft_s is not None:
        parts.append(f"TTFT {state.ttft_s * 1000:.0f} ms")
    if state.num_failed:
        parts.append(f"{state.num_failed} failed")
    if done:
        parts.append(f"{elapsed_s / done * (total - done):.0f} s left")
    return "  ".join(parts)


async def replay(
    target: HttpTarget,
    requests: list[TimedRequest],
    *,
    max_concurrency: int | None = None,
    progress: Progress | None = None,
    on_result: Callable[[RequestResult], None] | None = None,
) -> Replay:
    """Sends each request when it is due, or as soon as max_concurrency allows.

    An open loop (arrival times, no max_concurrency) is timed from when a request was due, not from
    when it was sent: a client that sends late must not make the server look fast.
    on_result: called with each result as it ends.
    When cancelled, as by Ctrl-C, it returns the results that there are.
    """
    encoded = [target.encode(request) for request in requests]
    results: list[RequestResult] = []

    def record(result: RequestResult) -> None:
        results.append(result)
        if on_result is not None:
            on_result(result)

    num_before = target.num_events
    async with _watched(progress, lambda: _state(results, target, num_before)):
        start_s, cpu_start_s = time.perf_counter(), time.process_time()
        with contextlib.suppress(asyncio.CancelledError):
            await _send_all(target, requests, encoded, start_s, max_concurrency, record)
        duration_s = time.perf_counter() - start_s
        cpu_s = time.process_time() - cpu_start_s
    return Replay(
        results=results,
        duration_s=duration_s,
        client_cpu_share=cpu_s / duration_s,
        is_interrupted=len(results) < len(requests),
    )


async def _send_all(
    target: HttpTarget,
    requests: list[TimedRequest],
    encoded: list[bytes],
    start_s: float,
    max_concurrency: int | None,
    record: Callable[[RequestResult], None],
) -> None:
    semaphore = asyncio.Semaphore(max_concurrency or len(requests) or 1)
    is_open_loop = max_concurrency is None and any(request.arrival_s for request in requests)

    async def send(request: TimedRequest, data: bytes, due_s: float) -> None:
        try:
            record(await target.send(request, data, due_s, is_open_loop=is_open_loop))
        finally:
            semaphore.release()

    async with asyncio.TaskGroup() as tasks:
        for request, data in zip(requests, encoded, strict=True):
            due_s = start_s + request.arrival_s
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            await semaphore.acquire()
            tasks.create_task(send(request, data, due_s))


@contextlib.asynccontextmanager
async def _watched(
    progress: Progress | None, state: Callable[[], ReplayState]
) -> AsyncIterator[None]:
    """Shows the progress of a replay, and keeps the collector from scanning what lives long."""
    gc.collect()
    gc.freeze()
    watcher = None if progress is None else asyncio.create_task(progress.watch(state))
    try:
        yield
    finally:
        gc.unfreeze()
        if watcher is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)


def _state(results: list[RequestResult], target: HttpTarget, num_before: int) -> ReplayState:
    ttfts = [result.ttft_s for result in results[-NUM_RECENT:] if result.arrivals_s]
    return ReplayState(
        num_done=len(results),
        num_failed=sum(result.error is not None for result in results),
        num_tokens=target.num_events - num_before,
        num_open=target.num_open,
        ttft_s=median(ttfts) if ttfts else None,
    )


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on uvloop if it is installed: an event costs a fifth less CPU time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def raise_open_file_limit() -> None:
    """Each connection is an open file, and the usual limit of 1,024 may be too low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
