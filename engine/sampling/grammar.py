"""The ids that a constrained row may have next: llguidance grammars, compiled for one tokenizer.

`GrammarCompiler` compiles. `Grammars` compiles in other threads and caches the latest.
`GrammarTable` has a matcher for each constrained slot of an executor.

Fuel (`_LIMITS`) does not bound a compilation: that of `a{4000000000}` takes all memory, and that of
a thousand chained rules overflows a stack of 1 MiB. So the server first compiles each grammar in a
process with limits, and sends the engine only what compiled there. llguidance releases the GIL
meanwhile. Work at run time is bounded by fuel per step; a matcher that runs out of it fails, and
its sequence ends with `FinishReason.ERROR`.

Imports no torch, because the server imports it.
"""

import ctypes
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from penstock.engine.config import LoadFormat
from penstock.engine.dummy_tokenizer import dummy_tokenizer, needs_dummy_tokenizer
from penstock.engine.errors import BadGrammar
from penstock.scheduler.types import SamplingParams, SlotAssignment

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
# Mask words from which on several threads are used: 8 rows of 128,000 ids.
_MIN_PARALLEL_WORDS = 1 << 15


class GrammarCompiler:
    """Compiles grammars for one model's tokenizer, which the first of them loads."""

    def __init__(self, load_tokenizer: Callable[[], LLTokenizer]) -> None:
        self._load_tokenizer = load_tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()

    @classmethod
    def of_model(
        cls,
        directory: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        load_format: LoadFormat = LoadFormat.AUTO,
    ) -> "GrammarCompiler":
        """vocab_size: the model's, which may exceed the tokenizer's. Reads no files yet."""
        return cls(partial(load_tokenizer, directory, vocab_size, eos_token_ids, load_format))

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
            self._tokenizer = self._tokenizer or self._load_tokenizer()
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


class _Cached(NamedTuple):
    future: "Future[LLMatcher]"
    num_bytes: int


class Grammars:
    """Compiled grammars of one model: at most `_MAX_CACHED`, and `_MAX_CACHED_BYTES` but for the
    latest. Use it from one thread."""

    def __init__(self, compiler: GrammarCompiler, eos_token_ids: tuple[int, ...]) -> None:
        self.eos_token_ids = eos_token_ids
        self._compiler = compiler
        self._compiled: OrderedDict[str, _Cached] = OrderedDict()
        self._num_bytes = 0
        self._pool = ThreadPoolExecutor(_NUM_COMPILERS, thread_name_prefix="grammar")

    @classmethod
    def of_model(
        cls,
        directory: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        load_format: LoadFormat = LoadFormat.AUTO,
    ) -> "Grammars":
        """See `GrammarCompiler.of_model`."""
        compiler = GrammarCompiler.of_model(directory, vocab_size, eos_token_ids, load_format)
        return cls(compiler, eos_token_ids)

    @property
    def num_cached(self) -> int:
        return len(self._compiled)

    def compile(self, grammar: str, num_bytes: int = 0) -> "Future[LLMatcher]":
        """A matcher in its initial state, to be copied before use; fails with BadGrammar.

        num_bytes: what the compiled grammar takes, beside its text.
        """
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


def load_tokenizer(
    directory: Path,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    load_format: LoadFormat = LoadFormat.AUTO,
) -> LLTokenizer:
    """Takes 1 s with a vocabulary of 150,000. Raises BadGrammar."""
    path = directory / "tokenizer.json"
    is_dummy = needs_dummy_tokenizer(directory, load_format)
    if not (path.is_file() or is_dummy) or not eos_token_ids:
        missing = "tokenizer.json" if eos_token_ids else "end-of-sequence token"
        raise BadGrammar(f"this model has no {missing}, which structured output needs")
    if is_dummy:
        text = dummy_tokenizer(vocab_size).to_str()
    else:
        text = _with_special_markers(path.read_text(encoding="utf-8"))
    return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))


def _with_special_markers(tokenizer: str) -> str:
    """Makes the tokens around reasoning special, so that no text of a grammar matches them.

    Some models have them as ordinary tokens, so that they are visible.
    """
    if not any(marker in tokenizer for marker in _REASONING_MARKERS):
        return tokenizer
    spec = json.loads(tokenizer)
    for token in spec.get("added_tokens") or ():
        token["special"] |= token["content"] in _REASONING_MARKERS
    return json.dumps(spec, ensure_ascii=False)


def _first_line(message: str) -> str:
    return (message.strip().splitlines() or ["it allows no text"])[0][:300]


class Constraint(NamedTuple):
    """to_the_end: see `SamplingParams.grammar_to_the_end`."""

    matcher: LLMatcher
    stop_token_ids: frozenset[int]
    to_the_end: bool


class GrammarTable:
    """A matcher and a mask for each slot whose request has a grammar.

    In a step: `assign` for its new sequences, `start` before the model runs, `wait` when its logits
    are ready, `advance` with the sampled ids. Matchers work in a thread between `start` and `wait`,
    while the model runs: each consumes the id that was sampled last, and computes its mask. That id
    must be on the host by then: an executor that runs ahead must wait for the previous step before
    it starts one with a constrained row.
    """

    def __init__(self, grammars: Grammars, max_num_seqs: int, vocab_size: int) -> None:
        self._grammars = grammars
        self.words_per_row = -(-vocab_size // 32)
        self._memory = (ctypes.c_int32 * (max_num_seqs * self.words_per_row))()
        self._bytes = memoryview(self._memory).cast("B")  # words are little-endian, as llguidance's
        self._nothing = bytes(4 * self.words_per_row)
        self._max_num_seqs = max_num_seqs
        self._constraints: dict[int, Constraint] = {}
        self._unconsumed: dict[int, int] = {}  # by slot, the id that its matcher has yet to consume
        self._failed: set[int] = set()
        self._executor = LLExecutor()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._pending: Future[None] | None = None

    @property
    def memory(self) -> "ctypes.Array[ctypes.c_int32]":
        """(max_num_seqs, words_per_row): bit i % 32 of word i // 32 is set if id i is allowed."""
        return self._memory

    def compile(self, sampling: SamplingParams) -> "Future[LLMatcher] | None":
        """Starts compiling what `assign` will need; None if there is nothing to wait for."""
        if sampling.grammar is None:
            return None
        future = self._grammars.compile(sampling.grammar, sampling.grammar_bytes)
        return None if future.done() and not future.exception() else future

    def assign(self, assignment: SlotAssignment) -> None:
        """A sequence enters its slot; after a preemption, with the output it already has."""
        slot = assignment.slot
        self._constraints.pop(slot, None)
        self._unconsumed.pop(slot, None)
        self._failed.discard(slot)
        sampling = assignment.sampling
        if sampling.grammar is None:
            return
        # Compiled when the request arrived, though the cache may have evicted it since.
        try:
            compiled = self._grammars.compile(sampling.grammar, sampling.grammar_bytes)
            matcher = compiled.result().deep_copy()
        except BadGrammar:
            self._failed.add(slot)
            return
        output_ids = assignment.token_ids[assignment.num_prompt_tokens :]
        if output_ids and not matcher.consume_tokens(list(output_ids)):
            self._failed.add(slot)
        stop_token_ids = frozenset(sampling.stop_token_ids)
        self._constraints[slot] = Constraint(matcher, stop_token_ids, sampling.grammar_to_the_end)

    def start(self, slots: Iterable[int]) -> None:
        """Starts computing the masks of those slots that have a grammar."""
        constrained = [slot for slot in slots if slot in self._constraints]
        if constrained:
            self._pending = self._worker.submit(self._fill, constrained)

    def wait(self) -> None:
        """Afterwards the masks that `start` began are in `memory`."""
        if self._pending:
            self._pending.result()
            self._pending = None

    def is_constrained(self, slot: int) -> bool:
        return slot in self._constraints

    def constrains_any(self, slots: Iterable[int]) -> bool:
        return not self._constraints.keys().isdisjoint(slots)

    def must_end(self, slot: int) -> bool:
        """Whether only an end token can follow: then it is sampled even if it is banned."""
        return slot in self._constraints and self._constraints[slot].matcher.is_stopped()

    def constraints(self, slots: Iterable[int]) -> list[Constraint | None]:
        """Of the sequences that have these slots now."""
        return [self._constraints.get(slot) for slot in slots]

    def advance(
        self, slots: list[int], token_ids: list[int], constraints: list[Constraint | None]
    ) -> frozenset[int]:
        """Records the sampled ids; returns the rows whose grammar has failed. A negative id is of a
        row that has failed otherwise.

        constraints: of the rows when their step was launched. Since then a slot may have been
        assigned to another sequence, whose grammar must not consume the id of the last one.
        A grammar fails if it runs out of fuel, or if no id that it allows could be sampled.
        """
        if not self._constraints and not self._failed:
            return frozenset()
        failed = []
        rows = zip(slots, token_ids, constraints, strict=True)
        for row, (slot, token_id, constraint) in enumerate(rows):
            if constraint is not self._constraints.get(slot) or token_id < 0:
                continue
            if slot in self._failed:
                failed.append(row)
            elif constraint is None:
                continue
            elif not self._allows(slot, token_id):
                failed.append(row)
            elif token_id not in constraint.stop_token_ids:
                self._unconsumed[slot] = token_id
        return frozenset(failed)

    def allowed_ids(self, slot: int) -> list[int]:
        """By the mask; slow."""
        return [i for i in range(32 * self.words_per_row) if self._allows(slot, i)]

    def _allows(self, slot: int, token_id: int) -> bool:
        byte = self._bytes[4 * self.words_per_row * slot + token_id // 8]
        return bool(byte >> token_id % 8 & 1)

    def _fill(self, slots: list[int]) -> None:
        """Runs in the thread. A matcher that cannot consume an id gives an empty mask."""
        pairs = [(self._constraints[slot].matcher, slot) for slot in slots]
        address, num_bytes = ctypes.addressof(self._memory), 4 * self.words_per_row
        unconsumed = self._unconsumed
        if len(slots) * self.words_per_row >= _MIN_PARALLEL_WORDS:
            ids = [(matcher, unconsumed.pop(slot)) for matcher, slot in pairs if slot in unconsumed]
            if ids:
                self._executor.consume_token_par(ids)
            self._executor.unsafe_compute_mask_ptr(pairs, address, num_bytes, self._max_num_seqs)
        else:
            for matcher, slot in pairs:
                if slot in unconsumed:
                    matcher.consume_token(unconsumed.pop(slot))
                matcher.unsafe_compute_mask_ptr(address + slot * num_bytes, num_bytes)
        self._failed |= {slot for matcher, slot in pairs if matcher.is_error()}
        for matcher, slot in pairs:
            if self._constraints[slot].to_the_end and not matcher.is_stopped():
                self._forbid_end(slot)

    def _forbid_end(self, slot: int) -> None:
        """Unless nothing else is allowed."""
        row = self._row(slot)
        allowed = [i for i in self._grammars.eos_token_ids if self._allows(slot, i)]
        for token_id in allowed:
            row[token_id // 8] ^= 1 << token_id % 8
        if row == self._nothing:
            for token_id in allowed:
                row[token_id // 8] ^= 1 << token_id % 8

    def _row(self, slot: int) -> memoryview:
        num_bytes = 4 * self.words_per_row
        return self._bytes[slot * num_bytes : (slot + 1) * num_bytes]
