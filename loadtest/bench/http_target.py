"""One OpenAI-compatible server: encodes requests, sends them, and stamps every streamed event.

What happens once per event is in `answer.py`; here is what happens once per request.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from penstock.loadtest.bench.answer import Answer, Usage, body_message
from penstock.loadtest.bench.http1 import BufferedResponse, ConnectionPool, HttpFailed
from penstock.loadtest.report.report import RequestResult
from penstock.loadtest.workload.lengths import Count
from penstock.loadtest.workload.workload import TimedRequest
from penstock.scheduler.errors import PenstockError

# Of texts whose tokens the server counts: few enough for it to stay idle otherwise.
MAX_COUNTED_AT_ONCE, COUNT_TIMEOUT_S = 16, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """Where requests go and what each of them says besides its prompt.

    extra_body: fields that each of them has besides; they win over ours. headers: HTTP's.
    logprobs: how many of each token are asked for. is_insecure: any TLS certificate will do.
    request_id_prefix: the rest of the x-request-id that each gets; None for none.
    """

    base_url: str
    model: str
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
            answer = BufferedResponse()
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


def _end_of(answer: Answer) -> str | None:
    """Takes in what the last event left behind; why that is no event, or None."""
    try:
        answer.on_end(time.perf_counter())
    except HttpFailed as error:
        return str(error)
    return None
