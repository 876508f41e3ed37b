"""Brings open requests back when their engine has ended: which of them, in which order, and which
not.

The engine that ended is replaced as often as `RestartBudget` allows. The new one gets every open
request with the ids that the server has, and each sampled id depends on the ids before it, the seed
and the position alone, so answers go on as if nothing had happened.

Where a request may have ended the engine, all that ran are suspects and come back one at a time,
alone, for a few tokens each. The one with which the engine ends again is not run a third time; all
others come back together.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from penstock.engine.errors import RequestEndedEngine
from penstock.engine.ipc.streams import OpenStreams, OutputStream
from penstock.engine.ipc.supervisor import End
from penstock.engine.process import logs
from penstock.engine.step.messages import OnWire, Submit, caller_of
from penstock.scheduler.types import FinishReason, RequestId, RequestOutput

logger = logging.getLogger(__name__)

_WINDOW_S = 600.0
_MAX_DELAY_S = 30.0
# A trial has the tokens of so many steps besides those that the server has. The last step whose ids
# that has may be three before the one that ended the engine: one that was launched, one launched
# ahead of it, and one whose message was lost.
_TRIAL_STEPS = 4


class RestartBudget:
    """How often an engine may be replaced, and after which pause."""

    def __init__(self, max_restarts: int) -> None:
        """max_restarts: within ten minutes."""
        self._max_restarts = max_restarts
        self._at_s: deque[float] = deque()
        self._num_in_vain = 0

    def delay_s(self, now_s: float, *, has_worked: bool) -> float | None:
        """Counts a restart, and returns how long to wait before it; None where it is one too many.

        has_worked: whether the engine that ended has returned any tokens. While engines end without
        that, the delay doubles: 0, 1, 2, 4, up to 30 s.
        """
        while self._at_s and self._at_s[0] <= now_s - _WINDOW_S:
            self._at_s.popleft()
        if len(self._at_s) >= self._max_restarts:
            return None
        self._at_s.append(now_s)
        self._num_in_vain = 0 if has_worked else self._num_in_vain + 1
        return min(_MAX_DELAY_S, 2.0 ** (self._num_in_vain - 2)) if self._num_in_vain > 1 else 0.0

    def last_words(self, why: str) -> str:
        """Why the last process ended, and why there is no other."""
        if not self._max_restarts:
            return why
        return (
            f"{why}; and it was replaced {self._max_restarts} times within "
            f"{_WINDOW_S / 60:.0f} minutes already, which is all that --max-engine-restarts allows"
        )


class Trial:
    """A suspect that runs alone: a few more tokens of each answer."""

    def __init__(self, stream: OutputStream) -> None:
        request = stream.resumption()
        assert request.resumed
        sampling = request.sampling
        num_known = max(len(answer.token_ids) for answer in request.resumed)
        num_tokens = num_known + _TRIAL_STEPS * stream.most_at_once
        self.is_short = num_tokens < sampling.max_tokens
        if self.is_short:
            sampling = replace(sampling, max_tokens=num_tokens)
        self.request = replace(request, sampling=sampling)
        self.over = asyncio.get_running_loop().create_future()
        self._num_open = len(request.resumed)

    def take(self, outputs: Iterable[RequestOutput]) -> Iterable[RequestOutput]:
        """The outputs of a step, without the ends that the trial's own max_tokens made."""
        return [self._take(output) if output.finish else output for output in outputs]

    def refuse(self, request_id: RequestId) -> None:
        """The engine did not accept a request."""
        if request_id == self.request.id:
            self._num_open = 0
            self._end()

    def _take(self, output: RequestOutput) -> RequestOutput:
        if output.request_id != self.request.id:
            return output
        self._num_open -= 1
        self._end()
        assert output.finish
        is_cut = self.is_short and output.finish.reason is FinishReason.LENGTH
        return output._replace(finish=None) if is_cut else output

    def _end(self) -> None:
        if not self._num_open and not self.over.done():
            self.over.set_result(None)


class Recovery:
    """The open requests' way into the next engine. On one event loop."""

    def __init__(self, streams: OpenStreams, max_num_seqs: int) -> None:
        self.num_resumed = 0  # requests that went on in another engine
        self.num_quarantined = 0  # requests that are not run again
        self._streams = streams
        self._max_num_seqs = max_num_seqs
        self._suspects: list[RequestId] = []  # the next is the last
        self._trial: Trial | None = None

    def on_end(self, end: End) -> None:
        trial, self._trial = self._trial, None
        if not end.cause.may_be_a_request:
            if trial:
                self._suspects.append(trial.request.id)
        elif trial:
            self._quarantine(trial.request.id, end.why)
        elif not self._suspects:
            self._suspects = self._in_flight()

    async def bring_back(self, send: Callable[[OnWire], None]) -> None:
        """Gives all open requests to an engine that is ready, suspects first and one at a time.
        Cancelled if the engine ends meanwhile, after `on_end`."""
        if self._suspects:
            logger.warning(
                "tried alone, one after the other, to find the request that ended the engine: %d",
                len(self._suspects),
            )
        while self._suspects:
            stream = self._streams.get(self._suspects.pop())
            if stream is not None:
                trial = self._trial = Trial(stream)
                send(Submit(trial.request))
                await trial.over
                if self._trial is not trial:
                    return  # the engine has ended
                self._trial = None
        for message in self._streams.resumptions():
            send(message)
        self.num_resumed += len(self._streams)

    def take(self, outputs: Iterable[RequestOutput]) -> Iterable[RequestOutput]:
        """The outputs of a step, as they are to reach the streams."""
        return self._trial.take(outputs) if self._trial else outputs

    def refuse(self, request_id: RequestId) -> None:
        if self._trial:
            self._trial.refuse(request_id)

    def _quarantine(self, request_id: RequestId, why: str) -> None:
        self._suspects.clear()  # the others were not to blame
        if self._streams.get(request_id):
            self.num_quarantined += 1
            ids = logs.fields(request_id=caller_of(request_id), engine_id=request_id)
            logger.error("it ended the engine twice, and is not run again", extra=ids)
            self._streams.fail(request_id, RequestEndedEngine(why))

    def _in_flight(self) -> list[RequestId]:
        """Those that may have run when the engine ended, the newest last, which is the likeliest.

        The step that ended it may have been their first, which is not known then: of those that are
        not known to have started, as many as there may have been places for, and those whose
        grammars the engine compiles before.
        """
        started = [stream for stream in self._streams if stream.has_started]
        num_places = self._max_num_seqs - sum(stream.num_open for stream in started)
        waiting = [stream for stream in self._streams if not stream.has_started]
        admitted = [
            stream
            for place, stream in enumerate(waiting)
            if place < num_places or stream.request.sampling.grammar is not None
        ]
        return [stream.request.id for stream in (*started, *admitted)]
