"""llguidance grammars, compiled for one tokenizer.

`GrammarCompiler` compiles. `Grammars` compiles in other threads and caches the latest.
`OpenGrammars` holds those of the requests that are open: a grammar is compiled once for all of
them, and stays until the last has ended, so a sequence that is preempted, or waits for long, finds
it compiled whatever the cache has evicted. So their memory is bounded: beyond `_MAX_OPEN_BYTES`, a
request's grammar is not compiled before others have ended.

Fuel (`_LIMITS`) does not bound a compilation: that of `a{4000000000}` takes all memory, and that of
a thousand chained rules overflows a stack of 1 MiB. So the server first compiles each grammar in a
process with limits, and sends the engine only what compiled there. llguidance releases the GIL
meanwhile. Work at run time is bounded by fuel per step; a matcher that runs out of it fails, and
its sequence ends with `FinishReason.ERROR`.

Imports no torch, because the server imports it.
"""

import contextlib
import json
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock.engine.config import LoadFormat
from penstock.engine.errors import BadGrammar
from penstock.engine.files.dummy_tokenizer import dummy_tokenizer, needs_dummy_tokenizer
from penstock.engine.files.gguf.file import is_gguf
from penstock.engine.files.gguf.tokenizer import read_tokenizer
from penstock.scheduler.types import RequestId, SamplingParams

# Fuel and items for a tenth of a millisecond each suffice for ordinary schemas; these limits, some
# 4 ms, for unusual ones. llguidance's defaults per step are 14 ms of lexing and as much for items.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
# The size of the cache. A large compiled grammar has some 10 MB, an ordinary one 100 kB.
_MAX_CACHED = 128
_MAX_CACHED_BYTES = 256 << 20
_NUM_COMPILERS = 2
# Eight times what the server's checker compiles with, so that no accepted grammar overflows it.
_STACK_BYTES = 16 << 20
_REASONING_MARKERS = ("<think>", "</think>", "<seed:think>", "</seed:think>", "[THINK]", "[/THINK]")


class GrammarCompiler:
    """Compiles grammars for one model's tokenizer, which the first of them loads."""

    def __init__(
        self,
        directory: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        load_format: LoadFormat = LoadFormat.AUTO,
    ) -> None:
        """vocab_size: the model's, which may exceed the tokenizer's. Reads no files yet."""
        self.eos_token_ids = eos_token_ids
        self._directory, self._vocab_size = directory, vocab_size
        self._load_format = load_format
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher in its initial state, whose first mask is computed. Raises BadGrammar."""
        try:
            return self._checked(grammar)
        except BadGrammar:
            raise
        except BaseException as error:  # a panic of Rust is not an Exception; we go on
            raise BadGrammar(_first_line(f"llguidance fails with {error!r}")) from error

    def _checked(self, grammar: str) -> LLMatcher:
        with self._lock:  # other threads wait for the tokenizer too
            self._tokenizer = self._tokenizer or self._read_tokenizer()
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            # Some grammars fail only here: those that allow no text at all, or too much at once.
            first = matcher.deep_copy()
            first.compute_bitmask()
            if first.is_error():
                raise BadGrammar(_first_line(first.get_error()))
        if matcher.is_error():
            raise BadGrammar(_first_line(matcher.get_error()))
        return matcher

    def _read_tokenizer(self) -> LLTokenizer:
        """Takes 1 s with a vocabulary of 150,000. Raises BadGrammar."""
        directory, size, ends = self._directory, self._vocab_size, self.eos_token_ids
        path, in_gguf = directory / "tokenizer.json", is_gguf(directory)
        is_dummy = needs_dummy_tokenizer(directory, self._load_format)
        if not (path.is_file() or is_dummy or in_gguf) or not ends:
            missing = "tokenizer.json" if ends else "end-of-sequence token"
            raise BadGrammar(f"this model has no {missing}, which structured output needs")
        if is_dummy:
            text = dummy_tokenizer(size).to_str()
        else:
            spec = read_tokenizer(directory) if in_gguf else path.read_text(encoding="utf-8")
            text = _with_special_markers(spec)
        return LLTokenizer(text, n_vocab=size, eos_token=list(ends))


class _Cached(NamedTuple):
    future: "Future[LLMatcher]"
    num_bytes: int


class Grammars:
    """Compiled grammars of one model: at most `_MAX_CACHED`, and `_MAX_CACHED_BYTES` but for the
    latest. Use it from one thread."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.eos_token_ids = compiler.eos_token_ids
        self._compiler = compiler
        self._compiled: OrderedDict[str, _Cached] = OrderedDict()
        self._num_bytes = 0
        self._pool = ThreadPoolExecutor(_NUM_COMPILERS, thread_name_prefix="grammar")

    def load_tokenizer(self) -> None:
        """Before there are streams: no other thread runs meanwhile."""
        with contextlib.suppress(BadGrammar):  # then each grammar gets the same error
            self._compiler.compile('start: "a"')

    @property
    def num_cached(self) -> int:
        return len(self._compiled)

    def compile(self, grammar: str, num_bytes: int = 0) -> "Future[LLMatcher]":
        """A matcher in its initial state, to be copied before use; fails with BadGrammar.
        num_bytes: what the compiled grammar takes, beside its text."""
        cached = self._compiled.get(grammar)
        if cached is None:
            cached = _Cached(self._submit(grammar), num_bytes + len(grammar))
            self._compiled[grammar] = cached
            self._num_bytes += cached.num_bytes
            while len(self._compiled) > _MAX_CACHED or self._num_bytes > _MAX_CACHED_BYTES:
                if len(self._compiled) == 1:
                    break
                self._num_bytes -= self._compiled.popitem(last=False)[1].num_bytes
        self._compiled.move_to_end(grammar)
        return cached.future

    def _submit(self, grammar: str) -> "Future[LLMatcher]":
        previous = threading.stack_size(_STACK_BYTES)  # of the thread that this may start
        try:
            return self._pool.submit(self._compiler.compile, grammar)
        finally:
            threading.stack_size(previous)


def _with_special_markers(tokenizer: str) -> str:
    """Makes the tokens around reasoning special, so that no text of a grammar matches them. Some
    models have them as ordinary tokens, so that they are visible."""
    if not any(marker in tokenizer for marker in _REASONING_MARKERS):
        return tokenizer
    spec = json.loads(tokenizer)
    for token in spec.get("added_tokens") or ():
        token["special"] |= token["content"] in _REASONING_MARKERS
    return json.dumps(spec, ensure_ascii=False)


def _first_line(message: str) -> str:
    return (message.strip().splitlines() or ["it allows no text"])[0][:300]


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
        """In its initial state, to be copied before use. An open request must have the grammar, and
        its future must be done."""
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
