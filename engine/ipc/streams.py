"""`OpenStreams`: the requests that have not ended, their outputs, and how many may be open.

It knows no process: it sends commands through a function and takes outputs in. So the streams
outlive an engine process that ends: each keeps its request and the ids that have arrived, of which
another engine can go on (`resumption`).
"""

import asyncio
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Self

from penstock.engine.errors import QueueFull, RequestRefused
from penstock.engine.step.messages import Abort, OnWire, Submit, SubmitAlike
from penstock.scheduler.errors import PenstockError
from penstock.scheduler.types import Request, RequestId, RequestOutput, ResumedAnswer, Started

# How many of the answers that ended last are used to estimate when the next one ends.
_RATE_WINDOW = 64
_MAX_RETRY_AFTER_S = 60


class OutputStream:
    """The outputs of one request: an async iterator whose items are all outputs that have arrived.
    A reader of many streams may use `listen` and `take` instead, which need no task per stream."""

    def __init__(self, streams: "OpenStreams", request: Request, first: RequestId) -> None:
        """first: of the requests with which this one was submitted."""
        self.request = request
        self.first = first
        self._streams = streams
        # The ids that have arrived of each answer without a final output.
        answers = request.resumed
        if answers is None:
            answers = tuple(map(ResumedAnswer, range(request.n)))
        self._open = {answer.index: array("i", answer.token_ids) for answer in answers}
        self._started: dict[int, Started] = {}
        self.most_at_once = 1
        """Tokens that a step gave an answer: with drafts, several."""
        self._waiting: list[RequestOutput] = []
        self._error: PenstockError | None = None
        self._is_scheduled = False  # a call of `notify` is
        self._on_news: Callable[[], None] | None = None
        # A bare future: an asyncio.Event looks up the loop, and so the process id, every time.
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        # For a request with a target, by which the engine may refuse it.
        self._accepted: asyncio.Future[None] | None = None
        if request.ttft_target_s is not None:
            self._accepted = self._loop.create_future()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[RequestOutput]:
        try:
            while not (outputs := self.take()):
                if self.is_over:
                    raise StopAsyncIteration
                self._waiter = self._loop.create_future()
                await self._waiter
        except asyncio.CancelledError:
            await self.aclose()
            raise
        return outputs

    def listen(self, on_news: Callable[[], None]) -> None:
        """Calls back, on the event loop, when `take` has news: once for all that came together. It
        must not raise: the streams that are notified after it would not be."""
        self._on_news = on_news

    def take(self) -> list[RequestOutput]:
        """All outputs that have arrived. Where there are none, raises the error that ended the
        request, if one did: EngineFailed or RequestRefused."""
        if not self._waiting and self._error:
            raise self._error
        outputs, self._waiting = self._waiting, []
        if self._error:
            self._schedule()  # one notification announced these outputs and the error
        return outputs

    async def accepted(self) -> None:
        """Returns when the engine has accepted the request; at once where it has no target by which
        it may be refused. Raises what `take` raises."""
        if self._accepted:
            await asyncio.shield(self._accepted)
        if self._error:
            raise self._error

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_over(self) -> bool:
        """No outputs are waiting, and none will come."""
        return not self._waiting and not self._open

    async def aclose(self) -> None:
        """Aborts what has not ended. Call it where the iteration may stop early."""
        if self._open and not self._error:
            self._streams.abort(self.request.id)

    # Called by `OpenStreams`.

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def has_started(self) -> bool:
        """Whether any of its answers is known to have run."""
        return bool(self._started)

    def start(self, started: Started) -> None:
        self._started[started.index] = started

    def push(self, output: RequestOutput) -> None:
        ids = self._open.get(output.index)
        if ids is None:
            return  # aborted while this was on its way
        self._waiting.append(output)
        ids.fromlist(output.token_ids)  # a fifth of the time of extend
        if len(output.token_ids) > self.most_at_once:
            self.most_at_once = len(output.token_ids)
        if output.finish:
            del self._open[output.index]
        self._schedule()

    def drop(self, index: int | None) -> None:
        if index is None:
            self._open.clear()
        else:
            self._open.pop(index, None)
        self._schedule()

    def resumption(self) -> Request:
        """The request for another engine, which goes on where the outputs that arrived end."""
        answers = []
        for index, ids in self._open.items():
            started = self._started.get(index)
            seen = (started.at_s, started.num_cached_tokens) if started else (None, 0)
            answers.append(ResumedAnswer(index, tuple(ids), *seen))
        return replace(self.request, resumed=tuple(answers))

    def fail(self, error: PenstockError) -> None:
        self._error = error
        self.accept()
        self._schedule()

    def accept(self) -> None:
        if self._accepted and not self._accepted.done():
            self._accepted.set_result(None)

    def notify(self) -> None:
        self._is_scheduled = False
        (self._on_news or self._wake)()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._streams.notify_soon(self)

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)


class OpenStreams:
    """The stream of every request that has not ended, and the limit on answers. On one event loop.
    An answer counts from its request's submission to its final output: `n` for each request."""

    def __init__(
        self,
        max_num_seqs: int,
        max_num_queued: int,
        send: Callable[[OnWire], None],
        *,
        is_fair: bool = False,
    ) -> None:
        """is_fair: a tenant that holds less than an equal share of the room is refused none of it,
        though others have filled it."""
        self._is_fair = is_fair
        self._open_of: Counter[str] = Counter()  # answers, by tenant
        self._max_open = max_num_seqs + max_num_queued
        self._send = send
        self._streams: dict[RequestId, OutputStream] = {}
        self._scheduled: list[OutputStream] = []  # to be notified
        self.num_open = 0
        """Answers that have not ended, running and waiting together."""
        self._ended_at_s: deque[float] = deque(maxlen=_RATE_WINDOW)

    def check_room(self, num_answers: int, tenant: str = "") -> None:
        """Raises RequestRefused for more answers than may ever be open, QueueFull for more than may
        be opened now."""
        if num_answers > self._max_open:
            raise RequestRefused(
                f"the request needs {num_answers} answers, and this server holds at most "
                f"{self._max_open}; send fewer prompts at a time, or a lower n"
            )
        if self.num_open + num_answers > self._max_open and not (
            self._is_fair and self._has_share(num_answers, tenant)
        ):
            raise QueueFull(
                num_answers,
                num_open=self.num_open,
                max_open=self._max_open,
                retry_after_s=self._retry_after_s(),
            )

    def _has_share(self, num_answers: int, tenant: str) -> bool:
        """Whether it would still hold no more than an equal share. Those who take theirs when the
        room is full can double what is open, and no more."""
        num_tenants = len(self._open_of.keys() | {tenant})
        return self._open_of[tenant] + num_answers <= self._max_open / num_tenants

    def _count(self, tenant: str, num_answers: int) -> None:
        self.num_open += num_answers
        self._open_of[tenant] += num_answers
        if not self._open_of[tenant]:
            del self._open_of[tenant]

    def submit_alike(self, requests: Sequence[Request]) -> list[OutputStream]:
        """Sends requests that differ as `SubmitAlike` says, all or none, and returns their streams.
        Raises as `check_room`."""
        self.check_room(sum(request.n for request in requests), requests[0].tenant)
        streams = [OutputStream(self, request, requests[0].id) for request in requests]
        for stream, request in zip(streams, requests, strict=True):
            self._streams[request.id] = stream
            self._count(request.tenant, stream.num_open)
        self._send(_submission(requests))
        return streams

    def get(self, request_id: RequestId) -> OutputStream | None:
        """None where the request has ended."""
        return self._streams.get(request_id)

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[OutputStream]:
        """Those of all open requests, in the order of their submission."""
        return iter(self._streams.values())

    @property
    def num_insert_bytes(self) -> int:
        """Of the contents of all open requests' inserts."""
        return sum(len(each.content) for stream in self for each in stream.request.inserts)

    def resumptions(self) -> list[OnWire]:
        """Messages that give all open requests to another engine, as they were submitted."""
        groups = groupby(self, key=attrgetter("first"))
        return [_submission([stream.resumption() for stream in group]) for _, group in groups]

    def start(self, started: Iterable[Started]) -> None:
        for each in started:
            if stream := self._streams.get(each.request_id):
                stream.start(each)

    def accept(self, request_id: RequestId) -> None:
        if stream := self._streams.get(request_id):
            stream.accept()

    def abort(self, request_id: RequestId, index: int | None = None) -> None:
        """Ends a request, or only its answer `index`; no more outputs come for it."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        self._send(Abort(request_id, index))
        num_before = stream.num_open
        stream.drop(index)
        self._count_ended(request_id, stream, num_before)

    def push(self, outputs: Iterable[RequestOutput]) -> None:
        streams = self._streams
        for output in outputs:
            stream = streams.get(output.request_id)
            if stream is None:
                continue
            num_before = stream.num_open
            stream.push(output)
            if output.finish:
                self._count_ended(output.request_id, stream, num_before)

    def fail(self, request_id: RequestId, error: PenstockError) -> None:
        """Ends a request that the engine did not accept, or must not run."""
        stream = self._streams.pop(request_id, None)
        if stream:
            self._count(stream.request.tenant, -stream.num_open)
            stream.fail(error)

    def fail_all(self, error: PenstockError) -> None:
        """Ends every open request with this error; later ones can be submitted."""
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        self.num_open = 0
        self._open_of.clear()

    def notify_soon(self, stream: OutputStream) -> None:
        """Notifies its listener after all messages that have arrived are taken in.

        One callback of the event loop serves all streams: one for each would cost more than most
        of what a listener does.
        """
        if not self._scheduled:
            asyncio.get_running_loop().call_soon(self._notify)
        self._scheduled.append(stream)

    def _notify(self) -> None:
        scheduled, self._scheduled = self._scheduled, []
        for stream in scheduled:
            stream.notify()

    def _count_ended(self, request_id: RequestId, stream: OutputStream, num_before: int) -> None:
        """Some answers of a stream have ended, or none: an answer that was aborted has a final
        output too, which may arrive while others of its request run."""
        num_ended = num_before - stream.num_open
        self._count(stream.request.tenant, -num_ended)
        self._ended_at_s.extend([time.monotonic()] * num_ended)
        if not stream.num_open:
            del self._streams[request_id]

    def _retry_after_s(self) -> int:
        """About when the next answer ends, from how often the last ones did."""
        if len(self._ended_at_s) < 2:
            return 1
        interval_s = (time.monotonic() - self._ended_at_s[0]) / len(self._ended_at_s)
        return max(1, min(_MAX_RETRY_AFTER_S, round(interval_s)))


def _submission(requests: Sequence[Request]) -> OnWire:
    return Submit(requests[0]) if len(requests) == 1 else SubmitAlike.of(requests)
