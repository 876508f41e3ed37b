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


async def _show_progress(line: Callable[[float], str]) -> None:
    """Shows a bar on stderr until cancelled: redrawn in place on a terminal, else a new line every
    10 s. line: from the seconds that have passed to the text."""
    is_terminal = sys.stderr.isatty()
    begin, end = ("\r", "\x1b[K") if is_terminal else ("", "\n")
    start_s = time.monotonic()

    def show() -> None:
        print(begin + line(time.monotonic() - start_s), end=end, file=sys.stderr, flush=True)

    try:
        while True:
            await asyncio.sleep(TERMINAL_INTERVAL_S if is_terminal else LOG_INTERVAL_S)
            show()
    finally:
        if is_terminal:
            show()
            print(file=sys.stderr)


def _progress_line(
    results: list[RequestResult], total: int, elapsed_s: float, num_tokens: int, num_open: int
) -> str:
    num_done, num_failed = len(results), sum(result.error is not None for result in results)
    filled = WIDTH * num_done // total
    parts = [
        f"{'█' * filled}{'·' * (WIDTH - filled)} {num_done}/{total}",
        f"{num_done / elapsed_s:.1f} req/s",
        f"{num_tokens / elapsed_s:.0f} tok/s",
        f"{num_open} in flight",
    ]
    if ttfts := [result.ttft_s for result in results[-NUM_RECENT:] if result.arrivals_s]:
        parts.append(f"TTFT {median(ttfts) * 1000:.0f} ms")
    if num_failed:
        parts.append(f"{num_failed} failed")
    if num_done:
        parts.append(f"{elapsed_s / num_done * (total - num_done):.0f} s left")
    return "  ".join(parts)


async def replay(
    target: HttpTarget,
    requests: list[TimedRequest],
    *,
    max_concurrency: int | None = None,
    shows_progress: bool = False,
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

    num_before = target.num_tokens

    def line(elapsed_s: float) -> str:
        num_tokens, num_open = target.num_tokens - num_before, target.num_open
        return _progress_line(results, len(requests), elapsed_s, num_tokens, num_open)

    async with _watched(line if shows_progress else None):
        start_s, cpu_start_s = time.perf_counter(), time.process_time()
        with contextlib.suppress(asyncio.CancelledError):
            await _send_all(target, requests, encoded, start_s, max_concurrency, record)
        duration_s = time.perf_counter() - start_s
        cpu_share = (time.process_time() - cpu_start_s) / duration_s
    return Replay(
        results=results,
        duration_s=duration_s,
        client_cpu_share=cpu_share,
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
async def _watched(line: Callable[[float], str] | None) -> AsyncIterator[None]:
    """Shows the progress of a replay, and keeps the collector from scanning what lives long."""
    was_frozen = gc.get_freeze_count() > 0  # by who imports this, and then it stays so
    gc.collect()
    gc.freeze()
    watcher = None if line is None else asyncio.create_task(_show_progress(line))
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        if watcher is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)


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
