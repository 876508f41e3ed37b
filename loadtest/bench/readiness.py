"""Before a measurement: waits for the server, lists its models, and sends warm-up requests."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing

import msgspec

from penstock.loadtest.bench.http1 import BufferedResponse, ConnectionPool, HttpFailed, NoTls
from penstock.loadtest.bench.http_target import HttpTarget
from penstock.loadtest.bench.replay import replay
from penstock.loadtest.bench.sse import error_message_of
from penstock.loadtest.workload.config import WorkloadConfig
from penstock.loadtest.workload.workload import make_warmup_requests
from penstock.scheduler.errors import PenstockError

_ADVICE = {
    401: "put the server's API key into OPENAI_API_KEY, or give --header Authorization=...",
    403: "put a key that may list models into OPENAI_API_KEY",
    404: "check --base-url",
}


class TargetUnusable(PenstockError):
    """The server cannot be measured; the message says why and what to change."""


class Model(msgspec.Struct):
    """An entry of GET /v1/models. max_model_len: vLLM's field, which not every server sends."""

    id: str
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[Model]


async def wait_until_ready(
    base_url: str,
    *,
    timeout_s: float,
    say: Callable[[str], None],
    headers: Mapping[str, str] | None = None,
    is_insecure: bool = False,
    needs_models: bool = True,
    advice: str = "start the server, check --base-url, or raise --ready-timeout",
) -> list[Model]:
    """Waits until the server responds, and returns its models. Raises TargetUnusable. needs_models:
    fail if the server has no GET /v1/models. advice: if it is not ready in time."""
    deadline_s = time.monotonic() + timeout_s
    last_state = ""
    async with aclosing(ConnectionPool(base_url, headers, is_insecure=is_insecure)) as pool:
        while True:
            try:
                async with asyncio.timeout(max(1.0, timeout_s)):
                    models = await _list_models(pool, needs_models)
                    # llama.cpp's server lists its model while it loads, and tells by this path
                    # that it does. A server without the path is taken to be ready.
                    await _fetch(pool, "/health")
                    return models
            except NoTls as error:
                raise TargetUnusable(str(error)) from error
            except (HttpFailed, TimeoutError) as error:
                state = str(error) or "it does not respond"
            if time.monotonic() >= deadline_s:
                raise TargetUnusable(
                    f"{base_url} is not ready after {timeout_s:g} s: {state}; {advice}"
                )
            if state != last_state:
                say(f"waiting for {base_url}: {state}")
                last_state = state
            await asyncio.sleep(0.2)


async def _list_models(pool: ConnectionPool, needs_models: bool) -> list[Model]:
    """Raises HttpFailed if a retry may help, and TargetUnusable if not."""
    response = await _fetch(pool, "/v1/models")
    if response.status not in (200, 401, 403) and not needs_models:
        return []  # some servers have only the endpoint that is measured
    if response.status != 200:
        raise TargetUnusable(
            f"GET /v1/models returned HTTP {response.status}: {error_message_of(response.data)}; "
            f"{_ADVICE.get(response.status, 'check --base-url')}"
        )
    try:
        return msgspec.json.decode(response.data, type=_ModelList).data
    except msgspec.MsgspecError as error:
        raise TargetUnusable(f"GET /v1/models returned no list of models: {error}") from error


async def _fetch(pool: ConnectionPool, path: str) -> BufferedResponse:
    """Raises HttpFailed while the server loads."""
    response = await pool.fetch("GET", path)
    if response.status == 503:
        raise HttpFailed(f"HTTP 503: {error_message_of(response.data)}")
    return response


async def warm_up(
    target: HttpTarget, workload: WorkloadConfig, count: int, max_concurrency: int | None
) -> None:
    """Sends `count` requests of the workload's lengths, with other prompts, so that none of the
    workload's is cached. Raises TargetUnusable if one fails: the rest would fail the same way."""
    if count < 1:
        return
    requests = make_warmup_requests(workload, count)
    warmed = await replay(target, requests, max_concurrency=max_concurrency)
    if warmed.is_interrupted:
        raise asyncio.CancelledError
    if warmed.failed:
        error = str(warmed.failed[0].error)
        advice = "; give --no-ignore-eos" if "ignore_eos" in error else ""
        raise TargetUnusable(f"a warm-up request failed: {error}{advice}")
