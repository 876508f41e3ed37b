"""Many prompts through the engine at once, for their pooled states and not for answers.

They go in together and batch with whatever else runs. No more wait in the engine's queue than keep
it busy, so that a request of two thousand inputs fits a queue that is shorter.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from penstock.engine.client import OutputStream, QueueFull
from penstock.scheduler.types import FinishReason, Request
from penstock.server.errors import InvalidLogits, RequestTimedOut
from penstock.server.observability.metrics import RequestTimes
from penstock.server.observability.request_log import EndedRequest
from penstock.server.service import Service

# How often a running request checks whether the queue has a place again.
_LOOK_AGAIN_S = 0.02

T = TypeVar("T")


async def pooled(
    service: Service, requests: Sequence[Request], read: Callable[[bytes], T]
) -> list[T]:
    """Returns what `read` makes of each prompt's pooled state, in order.

    Raises QueueFull, before anything has run; EngineFailed, RequestRefused, or RequestTimedOut.
    When it is cancelled, or one prompt fails, the others are aborted.
    """
    batch = _Batch(service, requests, read)
    on_end = service.on_end()
    metrics, arrival_s = service.metrics, requests[0].arrival_s
    outcome = "abandoned"  # until something else happens
    try:
        batch.submit()
        try:
            results = await _in_time(batch, arrival_s, service.config.server.request_timeout_s)
            outcome = "stop"
            metrics.latency.observe(time.monotonic() - arrival_s)
            return results
        except Exception:
            outcome = "failed"
            raise
        finally:
            metrics.outcomes[outcome] += 1
            if on_end:
                on_end(batch.ended(outcome))
    finally:
        await batch.close()


async def _in_time(batch: "_Batch[T]", arrival_s: float, timeout_s: float | None) -> list[T]:
    if timeout_s is None:
        return await batch.results()
    try:
        async with asyncio.timeout(arrival_s + timeout_s - time.monotonic()):
            return await batch.results()
    except TimeoutError as error:
        raise RequestTimedOut(timeout_s) from error


class _Batch(Generic[T]):
    """The prompts of one HTTP request: `submit` or be refused, await `results`; `close` in any
    case."""

    def __init__(
        self, service: Service, requests: Sequence[Request], read: Callable[[bytes], T]
    ) -> None:
        self._service = service
        self._requests = requests
        self._read = read
        self._waiting = deque(range(len(requests)))  # indices of those that are not submitted yet
        self._streams: dict[int, OutputStream] = {}  # of those that have not ended
        self._results: dict[int, T] = {}
        self._times: list[RequestTimes] = []

    def submit(self) -> None:
        """Twice as many as can run, or all. Raises QueueFull or EngineFailed."""
        engine = self._service.config.engine
        max_running = engine.scheduler.max_num_seqs
        max_open = min(2 * max_running, max_running + engine.max_num_queued_reqs)
        for _ in range(min(max_open, len(self._requests))):
            self._submit_next()
        for index in self._streams:  # now that none was refused
            self._count(index)

    async def results(self) -> list[T]:
        """Raises what the engine did."""
        try:
            async with asyncio.TaskGroup() as group:
                for index, stream in list(self._streams.items()):
                    group.create_task(self._work(index, stream))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [self._results[index] for index in range(len(self._requests))]

    def ended(self, outcome: str) -> EndedRequest:
        first = self._requests[0]
        started_s = [times.started_s[0] for times in self._times]
        return EndedRequest(
            id=first.id,
            operation="embeddings",
            arrival_s=first.arrival_s,
            started_s=min((s for s in started_s if s is not None), default=None),
            num_prompt_tokens=sum(len(request.prompt_token_ids) for request in self._requests),
            outcome=outcome,
        )

    async def close(self) -> None:
        """Aborts what has not ended."""
        for index, stream in self._streams.items():
            await stream.aclose()
            self._service.metrics.forget(self._requests[index].id)

    def _submit_next(self) -> tuple[int, OutputStream]:
        index = self._waiting[0]
        request = self._requests[index]
        stream = self._streams[index] = self._service.engine.submit(request)
        self._waiting.popleft()
        return index, stream

    def _count(self, index: int) -> None:
        request = self._requests[index]
        num_tokens = len(request.prompt_token_ids)
        times = self._service.metrics.on_submit(request.id, num_tokens, request.arrival_s)
        self._times.append(times)

    async def _work(self, index: int, stream: OutputStream) -> None:
        """One prompt to its end, then the next that waits."""
        while True:
            self._results[index] = self._read(await _state_of(stream))
            del self._streams[index]
            self._service.metrics.forget(self._requests[index].id)
            while self._waiting:
                try:
                    index, stream = self._submit_next()
                    self._count(index)
                    break
                except QueueFull:  # others took the place
                    await asyncio.sleep(_LOOK_AGAIN_S)
            else:
                return


async def _state_of(stream: OutputStream) -> bytes:
    state = None
    async for outputs in stream:
        for output in outputs:
            if output.finish and output.finish.reason is FinishReason.INVALID_LOGITS:
                raise InvalidLogits
            if output.prompt is not None:
                state = output.prompt.embedding
    assert state is not None, "the engine ended a prompt without its state"
    return state
