"""`OpenGrammars`: the compiled grammars of the requests that are open.

A grammar is compiled once for all open requests that have it, and stays until the last of them has
ended: a sequence that is preempted, or waits for long, finds it compiled whatever the cache of
`Grammars` has evicted. So their memory is bounded here: beyond `_MAX_OPEN_BYTES`, a request's
grammar is not compiled before others have ended. What a grammar means is not known here.
"""

from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass

from llguidance import LLMatcher

from penstock.engine.sampling.grammar import Grammars
from penstock.scheduler.types import RequestId, SamplingParams

# A hundred large grammars, or thousands of ordinary ones.
_MAX_OPEN_BYTES = 1 << 30


@dataclass(slots=True)
class _Open:
    future: "Future[LLMatcher]"
    num_bytes: int
    num_requests: int = 0


class OpenGrammars:
    """Each request with a grammar is opened once and closed once. Use it from one thread."""

    def __init__(self, grammars: Grammars, max_bytes: int = _MAX_OPEN_BYTES) -> None:
        self._grammars = grammars
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._open: dict[str, _Open] = {}  # by grammar
        self._grammar_of: dict[RequestId, str] = {}
        # In the order in which they came: (its sampling, what its caller waits for).
        self._deferred: OrderedDict[RequestId, tuple[SamplingParams, Future[LLMatcher]]] = (
            OrderedDict()
        )

    @property
    def num_open(self) -> int:
        """Grammars, not requests."""
        return len(self._open)

    def open(self, request_id: RequestId, sampling: SamplingParams) -> "Future[LLMatcher]":
        """Starts compiling the grammar. The future fails with BadGrammar."""
        if not self._deferred and self._fits(sampling):
            return self._compile(request_id, sampling)
        future: Future[LLMatcher] = Future()
        self._deferred[request_id] = sampling, future
        return future

    def close(self, request_id: RequestId) -> None:
        """The request has ended. One that was never opened is no error."""
        self._deferred.pop(request_id, None)
        grammar = self._grammar_of.pop(request_id, None)
        if grammar is not None:
            entry = self._open[grammar]
            entry.num_requests -= 1
            if not entry.num_requests:
                self._num_bytes -= entry.num_bytes
                del self._open[grammar]
        while self._deferred:
            first = next(iter(self._deferred))
            sampling, awaited = self._deferred[first]
            if not self._fits(sampling):
                return
            del self._deferred[first]
            _pass_on(self._compile(first, sampling), awaited)

    def has(self, grammar: str) -> bool:
        return grammar in self._open

    def matcher(self, grammar: str) -> LLMatcher:
        """In its initial state, to be copied before use.

        An open request must have the grammar, and its future must be done.
        """
        entry = self._open.get(grammar)
        assert entry and entry.future.done(), f"a sequence runs before its grammar: {grammar[:200]}"
        return entry.future.result()

    def _fits(self, sampling: SamplingParams) -> bool:
        """One always does, whatever its size."""
        if not self._open or sampling.grammar in self._open:
            return True
        return self._num_bytes + _num_bytes(sampling) <= self._max_bytes

    def _compile(self, request_id: RequestId, sampling: SamplingParams) -> "Future[LLMatcher]":
        assert sampling.grammar is not None and request_id not in self._grammar_of, request_id
        entry = self._open.get(sampling.grammar)
        if entry is None:
            future = self._grammars.compile(sampling.grammar, sampling.grammar_bytes)
            entry = self._open[sampling.grammar] = _Open(future, _num_bytes(sampling))
            self._num_bytes += entry.num_bytes
        entry.num_requests += 1
        self._grammar_of[request_id] = sampling.grammar
        return entry.future


def _num_bytes(sampling: SamplingParams) -> int:
    return sampling.grammar_bytes + len(sampling.grammar or "")


def _pass_on(source: "Future[LLMatcher]", target: "Future[LLMatcher]") -> None:
    """The result of source, now or later, to target."""

    def pass_on(done: "Future[LLMatcher]") -> None:
        if error := done.exception():
            target.set_exception(error)
        else:
            target.set_result(done.result())

    source.add_done_callback(pass_on)
