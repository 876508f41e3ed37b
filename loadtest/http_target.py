"""Replays a workload against any OpenAI-compatible URL and stamps every streamed event.

A request is sent when it is due and timed from that moment, connecting included, so a server that
is slow to accept cannot look fast. What happens once per event is in `answer.py`; here is what
happens once per request.
"""

import asyncio
import contextlib
import gc
import resource
import time
from collections.abc import Callable, Coroutine
from statistics import median
from typing import Any, Self, TypeVar

import msgspec

from loadtest.answer import Answer, Usage, body_message
from loadtest.config import TargetConfig, WorkloadConfig
from loadtest.http1 import ConnectionPool, HttpFailed
from loadtest.progress import Progress, ReplayState
from loadtest.report import Replay, RequestResult
from loadtest.workload import TimedRequest, make_strangers
from scheduler.errors import PenstockError

T = TypeVar("T")
# Answers whose median TTFT the progress bar shows.
NUM_RECENT = 1000


class TargetUnusable(PenstockError):
    """The server cannot be measured; the message says why and what to change."""


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


class _Body:
    """Takes in an answer as a whole."""

    def __init__(self) -> None:
        self.status = 0
        self.data = b""

    def on_head(self, status: int, now: float) -> None:
        self.status = status

    def on_body(self, data: bytes, now: float) -> None:
        self.data += data


class HttpTarget:
    """One server and model: `async with HttpTarget(config) as target`."""

    def __init__(self, config: TargetConfig) -> None:
        self._config = config
        self._pool = ConnectionPool(config.base_url)
        self._open: set[Answer] = set()
        self._num_ended_events = 0

    @property
    def num_open(self) -> int:
        """Requests in flight."""
        return len(self._open)

    @property
    def num_events(self) -> int:
        """Token events received so far, for the progress bar."""
        return self._num_ended_events + sum(len(answer.arrivals_s) for answer in self._open)

    def encode(self, request: TimedRequest) -> bytes:
        body: dict[str, Any] = {
            "model": self._config.model,
            "max_tokens": request.max_tokens,
            "temperature": self._config.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._config.ignore_eos:
            body["ignore_eos"] = True
        if self._config.endpoint.endswith("/chat/completions"):
            user = [{"role": "user", "content": request.prompt}]
            body["messages"] = request.messages or user
        else:
            body["prompt"] = request.prompt
        body |= self._config.extra_body
        return self._pool.encode(
            "POST", self._config.endpoint, msgspec.json.encode(body), api_key=self._config.api_key
        )

    async def send(
        self, request: TimedRequest, encoded: bytes, scheduled_s: float
    ) -> RequestResult:
        """Sends one request and reads its answer to the end; every failure becomes a result."""
        answer, failure = Answer(), None
        self._open.add(answer)
        sent_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                await self._pool.request(encoded, answer)
        except PenstockError as error:
            failure = str(error)
        except TimeoutError:
            failure = f"no complete answer within {self._config.request_timeout_s:g} s"
        finally:
            self._open.discard(answer)
            self._num_ended_events += len(answer.arrivals_s)
        usage = answer.usage or Usage(request.num_prompt_tokens, len(answer.arrivals_s))
        # More events than tokens: the last one brought the finish reason alone.
        del answer.arrivals_s[usage.completion_tokens :]
        return RequestResult(
            index=request.index,
            scheduled_s=scheduled_s,
            sent_s=sent_s,
            ended_s=time.perf_counter(),
            num_prompt_tokens=usage.prompt_tokens,
            num_output_tokens=usage.completion_tokens,
            arrivals_s=answer.arrivals_s,
            text="".join(answer.texts),
            status=answer.status,
            error=failure or answer.problem(),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._pool.close()


async def replay(
    target: HttpTarget,
    requests: list[TimedRequest],
    *,
    max_concurrency: int | None = None,
    progress: Progress | None = None,
    on_result: Callable[[RequestResult], None] | None = None,
) -> Replay:
    """Sends each request when it is due, or as soon as a place is free where concurrency is capped.

    on_result: told of each answer as it ends.
    Cancelled, as by Ctrl-C, it gives what had ended by then.
    """
    encoded = [target.encode(request) for request in requests]
    places = asyncio.Semaphore(max_concurrency or len(requests) or 1)
    results: list[RequestResult] = []

    async def ask(request: TimedRequest, data: bytes, scheduled_s: float) -> None:
        try:
            results.append(await target.send(request, data, scheduled_s))
            if on_result is not None:
                on_result(results[-1])
        finally:
            places.release()

    async def ask_all() -> None:
        async with asyncio.TaskGroup() as tasks:
            for request, data in zip(requests, encoded, strict=True):
                due_s = start_s + request.arrival_s
                if (wait_s := due_s - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                await places.acquire()
                tasks.create_task(ask(request, data, due_s))

    gc.collect()
    gc.freeze()  # the workload is large and stays: no collection needs to walk it
    watcher = None
    if progress is not None:
        num_before = target.num_events
        watcher = asyncio.create_task(progress.watch(lambda: _state(results, target, num_before)))
    start_s, cpu_start_s = time.perf_counter(), time.process_time()
    with contextlib.suppress(asyncio.CancelledError):
        await ask_all()
    duration_s = time.perf_counter() - start_s
    cpu_s = time.process_time() - cpu_start_s
    gc.unfreeze()
    if watcher is not None:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
    return Replay(
        results=results,
        duration_s=duration_s,
        client_cpu_share=cpu_s / duration_s,
        is_interrupted=len(results) < len(requests),
    )


def _state(results: list[RequestResult], target: HttpTarget, num_before: int) -> ReplayState:
    ttfts = [result.ttft_s for result in results[-NUM_RECENT:] if result.arrivals_s]
    return ReplayState(
        num_done=len(results),
        num_failed=sum(result.error is not None for result in results),
        num_tokens=target.num_events - num_before,
        num_open=target.num_open,
        ttft_s=median(ttfts) if ttfts else None,
    )


async def wait_until_ready(
    base_url: str, *, api_key: str | None, timeout_s: float, say: Callable[[str], None]
) -> list[str]:
    """The ids of the models that the server has, as soon as it answers. Raises TargetUnusable."""
    deadline_s = time.monotonic() + timeout_s
    said = ""
    pool = ConnectionPool(base_url)
    try:
        while True:
            try:
                async with asyncio.timeout(max(1.0, timeout_s)):
                    return await _list_models(pool, api_key)
            except (HttpFailed, TimeoutError) as error:
                state = str(error) or "it does not answer"
            if time.monotonic() >= deadline_s:
                raise TargetUnusable(
                    f"{base_url} is not ready after {timeout_s:g} s: {state}; start the server, "
                    "check --base-url, or raise --ready-timeout"
                )
            if state != said:
                say(f"waiting for {base_url}: {state}")
                said = state
            await asyncio.sleep(0.2)
    finally:
        await pool.close()


async def _list_models(pool: ConnectionPool, api_key: str | None) -> list[str]:
    """Raises HttpFailed while asking again may help, and TargetUnusable where it will not."""
    answer = _Body()
    await pool.request(pool.encode("GET", "/v1/models", api_key=api_key), answer)
    if answer.status == 503:
        raise HttpFailed(f"HTTP 503: {body_message(answer.data)}")
    if answer.status != 200:
        raise TargetUnusable(
            f"GET /v1/models answers HTTP {answer.status}: {body_message(answer.data)}"
        )
    try:
        return [model.id for model in msgspec.json.decode(answer.data, type=_ModelList).data]
    except msgspec.MsgspecError as error:
        raise TargetUnusable(f"GET /v1/models answers no list of models: {error}") from error


async def warm_up(
    target: HttpTarget, workload: WorkloadConfig, count: int, max_concurrency: int | None
) -> None:
    """Sends `count` requests as long as the workload's, with other prompts, so that none of its own
    is cached. Raises TargetUnusable if one fails: the rest would fail the same way."""
    if count < 1:
        return
    strangers = make_strangers(workload, count)
    warmed = await replay(target, strangers, max_concurrency=max_concurrency)
    if warmed.is_interrupted:
        raise asyncio.CancelledError
    if warmed.failed:
        raise TargetUnusable(f"a warm-up request failed: {warmed.failed[0].error}")


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on uvloop, where there is one: an event costs it a fifth less."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def raise_open_file_limit() -> None:
    """A connection is an open file, and the usual limit of 1,024 is less than one may ask for."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
