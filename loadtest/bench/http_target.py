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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from statistics import median
from typing import Any, Self, TypeVar

import msgspec

from penstock.loadtest.bench.answer import Answer, Usage, body_message
from penstock.loadtest.bench.http1 import ConnectionPool, HttpFailed
from penstock.loadtest.bench.progress import Progress, ReplayState
from penstock.loadtest.config import TargetConfig, WorkloadConfig
from penstock.loadtest.report.report import Replay, RequestResult
from penstock.loadtest.workload.lengths import Count
from penstock.loadtest.workload.workload import TimedRequest, make_strangers
from penstock.scheduler.errors import PenstockError

T = TypeVar("T")
# Answers whose median TTFT the progress bar shows.
NUM_RECENT = 1000


# Of texts whose tokens the server counts: few enough for it to stay idle otherwise.
MAX_COUNTED_AT_ONCE, COUNT_TIMEOUT_S = 16, 30.0
_ADVICE = {
    401: "put the server's API key into OPENAI_API_KEY, or give --header Authorization=...",
    403: "put a key that may ask for models into OPENAI_API_KEY",
    404: "check --base-url",
}


class TargetUnusable(PenstockError):
    """The server cannot be measured; the message says why and what to change."""


class Model(msgspec.Struct):
    """One of GET /v1/models. max_model_len: vLLM's field, which not every server has."""

    id: str
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[Model]


class _Tokenized(msgspec.Struct):
    count: int


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

    def __init__(self, config: TargetConfig, count: Count | None = None) -> None:
        """count: of an answer's tokens where the server does not say how many it has."""
        self._config, self._count = config, count
        self._pool = ConnectionPool(config.base_url, config.headers, is_insecure=config.is_insecure)
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
        config = self._config
        is_chat = config.endpoint.endswith("/chat/completions")
        body: dict[str, Any] = {
            "model": config.model,
            "max_tokens": request.max_tokens,
            "temperature": config.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if config.ignore_eos:
            body["ignore_eos"] = True
        if config.logprobs is not None:
            body["logprobs"] = True if is_chat else config.logprobs
            body |= {"top_logprobs": config.logprobs} if is_chat else {}
        if is_chat:
            user = [{"role": "user", "content": request.prompt}]
            body["messages"] = request.messages or user
        else:
            body["prompt"] = request.prompt
        body |= config.extra_body
        headers = {}
        if config.request_id_prefix is not None:
            headers["x-request-id"] = f"{config.request_id_prefix}{request.index}"
        return self._pool.encode("POST", config.endpoint, msgspec.json.encode(body), headers)

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """As vLLM's POST /tokenize counts them. Raises HttpFailed where there is none."""
        places = asyncio.Semaphore(MAX_COUNTED_AT_ONCE)

        async def count(text: str) -> int:
            body = msgspec.json.encode({"model": self._config.model, "prompt": text})
            answer = _Body()
            encoded = self._pool.encode("POST", "/tokenize", body)
            try:
                async with places, asyncio.timeout(COUNT_TIMEOUT_S):
                    await self._pool.request(encoded, answer)
            except TimeoutError as error:
                raise HttpFailed("/tokenize does not answer") from error
            if answer.status != 200:
                raise HttpFailed(f"HTTP {answer.status}: {body_message(answer.data)}")
            try:
                return msgspec.json.decode(answer.data, type=_Tokenized).count
            except msgspec.MsgspecError as error:
                raise HttpFailed(f"/tokenize answers no count: {error}") from error

        return await asyncio.gather(*map(count, texts))

    async def send(
        self,
        request: TimedRequest,
        encoded: bytes,
        scheduled_s: float,
        *,
        is_open_loop: bool = False,
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
        else:
            failure = _end_of(answer)
        finally:
            self._open.discard(answer)
            self._num_ended_events += len(answer.arrivals_s)
        usage = answer.usage or Usage()
        num_events = len(answer.arrivals_s)
        text = "".join(answer.texts)
        num_tokens = usage.completion_tokens
        if not num_tokens and self._count is not None and text:
            (num_tokens,) = self._count([text])
        is_counted = bool(num_tokens)
        num_tokens = num_tokens or num_events - answer.has_empty_end
        # More events than tokens: the last one brought the finish reason alone.
        del answer.arrivals_s[max(1, num_tokens) :]
        return RequestResult(
            index=request.index,
            scheduled_s=scheduled_s,
            sent_s=sent_s,
            ended_s=time.perf_counter(),
            num_prompt_tokens=usage.prompt_tokens or request.num_prompt_tokens,
            num_output_tokens=num_tokens,
            is_open_loop=is_open_loop,
            is_counted=is_counted,
            arrivals_s=answer.arrivals_s,
            text=text,
            status=answer.status,
            error=answer.error or failure or answer.problem(),
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

    Where each has a time of its own and no cap keeps it waiting, that time is what it is timed
    from: a client that sends late must not make the server look fast.
    on_result: told of each answer as it ends.
    Cancelled, as by Ctrl-C, it gives what had ended by then.
    """
    encoded = [target.encode(request) for request in requests]
    places = asyncio.Semaphore(max_concurrency or len(requests) or 1)
    results: list[RequestResult] = []
    is_open_loop = max_concurrency is None and any(request.arrival_s for request in requests)

    async def ask(request: TimedRequest, data: bytes, scheduled_s: float) -> None:
        try:
            results.append(await target.send(request, data, scheduled_s, is_open_loop=is_open_loop))
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


def _end_of(answer: Answer) -> str | None:
    """Takes in what the last event left behind; why that is no event, or None."""
    try:
        answer.on_end(time.perf_counter())
    except HttpFailed as error:
        return str(error)
    return None


async def wait_until_ready(
    base_url: str,
    *,
    timeout_s: float,
    say: Callable[[str], None],
    headers: Mapping[str, str] | None = None,
    is_insecure: bool = False,
    needs_models: bool = True,
) -> list[Model]:
    """The models that the server has, as soon as it answers. Raises TargetUnusable.

    needs_models: a server without GET /v1/models is of no use.
    """
    deadline_s = time.monotonic() + timeout_s
    said = ""
    pool = ConnectionPool(base_url, headers, is_insecure=is_insecure)
    try:
        while True:
            try:
                async with asyncio.timeout(max(1.0, timeout_s)):
                    return await _list_models(pool, needs_models)
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


async def _list_models(pool: ConnectionPool, needs_models: bool) -> list[Model]:
    """Raises HttpFailed while asking again may help, and TargetUnusable where it will not."""
    answer = _Body()
    await pool.request(pool.encode("GET", "/v1/models"), answer)
    if answer.status == 503:
        raise HttpFailed(f"HTTP 503: {body_message(answer.data)}")
    if answer.status not in (200, 401, 403) and not needs_models:
        return []  # some servers fail here and answer where it counts
    if answer.status != 200:
        raise TargetUnusable(
            f"GET /v1/models answers HTTP {answer.status}: {body_message(answer.data)}; "
            f"{_ADVICE.get(answer.status, 'check --base-url')}"
        )
    try:
        return msgspec.json.decode(answer.data, type=_ModelList).data
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
        error = str(warmed.failed[0].error)
        advice = "; give --no-ignore-eos" if "ignore_eos" in error else ""
        raise TargetUnusable(f"a warm-up request failed: {error}{advice}")


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
