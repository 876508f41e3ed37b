"""One OpenAI-compatible server: encodes requests, sends them, and stamps every streamed event.

What happens once per event is in `sse.py`; this module is what happens once per request.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from penstock.loadtest.bench.http1 import ConnectionPool, HttpFailed
from penstock.loadtest.bench.sse import StreamedResponse, Usage, error_message_of
from penstock.loadtest.report.report import RequestResult
from penstock.loadtest.workload.token_counter import TokenCounter
from penstock.loadtest.workload.workload import TimedRequest
from penstock.scheduler.errors import PenstockError

# Texts that the server tokenizes at once: few, so that it is not busy with them.
MAX_COUNTED_AT_ONCE, COUNT_TIMEOUT_S = 16, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """Where requests are sent, and their fields besides the prompt.

    extra_body: further fields, which override ours; None leaves a field out. headers: HTTP headers.
    logprobs: the number requested for each token. is_insecure: accept any TLS certificate.
    request_id_prefix: x-request-id is this and the request's index; None: no x-request-id.
    """

    base_url: str = ""
    model: str = ""
    endpoint: str = "/v1/completions"
    temperature: float = 0.0
    ignore_eos: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    logprobs: int | None = None
    request_id_prefix: str | None = None
    is_insecure: bool = False
    request_timeout_s: float = 600.0


class _Tokenized(msgspec.Struct):
    count: int


class HttpTarget:
    """One server and model: `async with HttpTarget(config) as target`."""

    def __init__(self, config: TargetConfig, count: TokenCounter | None = None) -> None:
        """count: counts a response's tokens where the server sends no usage."""
        self._config, self._count = config, count
        self._pool = ConnectionPool(config.base_url, config.headers, is_insecure=config.is_insecure)
        self._open: set[StreamedResponse] = set()
        self._num_ended_tokens = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_tokens(self) -> int:
        """Of responses that have ended, and events of those that have not, for the progress bar."""
        return self._num_ended_tokens + sum(len(response.arrivals_s) for response in self._open)

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
        body = {name: value for name, value in body.items() if value is not None}
        headers = {}
        if config.request_id_prefix is not None:
            headers["x-request-id"] = f"{config.request_id_prefix}{request.index}"
        return self._pool.encode("POST", config.endpoint, msgspec.json.encode(body), headers)

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Counts with the server's POST /tokenize, as vLLM has it. Raises HttpFailed."""
        semaphore = asyncio.Semaphore(MAX_COUNTED_AT_ONCE)

        async def count(text: str) -> int:
            body = msgspec.json.encode({"model": self._config.model, "prompt": text})
            try:
                async with semaphore, asyncio.timeout(COUNT_TIMEOUT_S):
                    response = await self._pool.fetch("POST", "/tokenize", body)
            except TimeoutError as error:
                raise HttpFailed("/tokenize does not respond") from error
            if response.status != 200:
                raise HttpFailed(f"HTTP {response.status}: {error_message_of(response.data)}")
            try:
                return msgspec.json.decode(response.data, type=_Tokenized).count
            except msgspec.MsgspecError as error:
                raise HttpFailed(f"/tokenize returned no count: {error}") from error

        return await asyncio.gather(*map(count, texts))

    async def send(
        self,
        request: TimedRequest,
        encoded: bytes,
        scheduled_s: float,
        *,
        is_open_loop: bool = False,
    ) -> RequestResult:
        """Sends one request and reads its response to the end; failures become results too."""
        response = StreamedResponse()
        self._open.add(response)
        sent_s = time.perf_counter()
        try:
            failure = await self._receive(encoded, response)
        finally:
            self._open.discard(response)
        usage, text = response.usage or Usage(), "".join(response.texts)
        num_tokens = usage.completion_tokens
        if not num_tokens and self._count is not None and text:
            (num_tokens,) = self._count([text])
        is_counted = bool(num_tokens)
        num_tokens = num_tokens or len(response.arrivals_s) - response.has_empty_end
        # More events than tokens: the last one had the finish reason alone.
        del response.arrivals_s[max(1, num_tokens) :]
        self._num_ended_tokens += num_tokens
        return RequestResult(
            index=request.index,
            scheduled_s=scheduled_s,
            sent_s=sent_s,
            ended_s=time.perf_counter(),
            num_prompt_tokens=usage.prompt_tokens or request.num_prompt_tokens,
            num_output_tokens=num_tokens,
            num_cached_tokens=usage.cached_tokens,
            is_open_loop=is_open_loop,
            is_counted=is_counted,
            arrivals_s=response.arrivals_s,
            text=text,
            status=response.status,
            error=response.error or failure or response.problem(),
        )

    async def _receive(self, encoded: bytes, response: StreamedResponse) -> str | None:
        """Exchanges one request for its response; returns why that failed, None if it did not."""
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                await self._pool.request(encoded, response)
            response.on_end(time.perf_counter())
        except PenstockError as error:
            return str(error)
        except TimeoutError:
            return f"no complete response within {self._config.request_timeout_s:g} s"
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._pool.aclose()
