"""What a constrained row may say next: llguidance's grammars, compiled for one model's tokenizer.

`Grammars` compiles off the calling thread and keeps the latest; the server uses one to refuse at
admission what does not compile, the engine another to make its matchers. `GrammarTable` holds a
matcher for each constrained slot of an executor.

Compiling is bounded by fuel (`_LIMITS`) and needs no deadline of its own: of what was tried to
make it explode, nothing took 0.5 s on one core, and llguidance lets go of the GIL meanwhile. What
is left to do while it runs is bounded by fuel a step; a matcher that runs out of it fails, and its
sequence ends with `FinishReason.ERROR`.

Torch-free, because the server imports it.
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
from penstock.engine.errors import BadGrammar
from penstock.engine.models.dummy_tokenizer import dummy_tokenizer, needs_dummy_tokenizer
from penstock.scheduler.types import SamplingParams, SlotAssignment

# A tenth of a millisecond of fuel and items each would do for ordinary schemas; this much, some
# 4 ms, for odd ones. llguidance's defaults for a step are 14 ms of lexing and as many items.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
# Compiled grammars that are kept. A large one holds some 10 MB, an ordinary one 100 kB.
_MAX_KEPT = 128
_MAX_KEPT_CHARS = 4 << 20
_NUM_COMPILERS = 2
_THOUGHT_MARKS = ("<think>", "</think>", "<seed:think>", "</seed:think>", "[THINK]", "[/THINK]")
# Words of mask that are worth several threads: 8 rows of 128,000 ids. Fewer go one after the other.
_MIN_PARALLEL_WORDS = 1 << 15


class Grammars:
    """Compiled grammars of one model, at most `_MAX_KEPT`. To be used from one thread."""

    def __init__(
        self, load_tokenizer: Callable[[], LLTokenizer], eos_token_ids: tuple[int, ...]
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self._load_tokenizer = load_tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._num_chars = 0
        self._pool = ThreadPoolExecutor(_NUM_COMPILERS, thread_name_prefix="grammar")

    @classmethod
    def of_model(
        cls,
        directory: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        load_format: LoadFormat = LoadFormat.AUTO,
    ) -> "Grammars":
        """vocab_size: the model's, which may be larger than the tokenizer's. Reads nothing yet."""
        load = partial(load_tokenizer, directory, vocab_size, eos_token_ids, load_format)
        return cls(load, eos_token_ids)

    def compile(self, grammar: str) -> "Future[LLMatcher]":
        """A matcher in its first state, not to be advanced; fails with BadGrammar."""
        future = self._compiled.get(grammar)
        if future is None:
            future = self._pool.submit(self._compile, grammar)
            self._compiled[grammar] = future
            self._num_chars += len(grammar)
            while len(self._compiled) > _MAX_KEPT or self._num_chars > _MAX_KEPT_CHARS:
                if len(self._compiled) == 1:
                    break
                self._num_chars -= len(self._compiled.popitem(last=False)[0])
        self._compiled.move_to_end(grammar)
        return future

    def _compile(self, grammar: str) -> LLMatcher:
        try:
            return self._checked(grammar)
        except BadGrammar:
            raise
        except BaseException as error:  # a panic of Rust's is no Exception; it ends no process here
            raise BadGrammar(_first_line(f"llguidance fails with {error!r}")) from error

    def _checked(self, grammar: str) -> LLMatcher:
        with self._lock:  # a second thread waits for the tokenizer too
            self._tokenizer = self._tokenizer or self._load_tokenizer()
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            # A few grammars fail only now: those that allow no text at all, or too much at once.
            first = matcher.deep_copy()
            first.compute_bitmask()
            if first.is_error():
                raise BadGrammar(_first_line(first.get_error()))
        if matcher.is_error():
            raise BadGrammar(_first_line(matcher.get_error()))
        return matcher


def load_tokenizer(
    directory: Path,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    load_format: LoadFormat = LoadFormat.AUTO,
) -> LLTokenizer:
    """Takes some time with a large vocabulary, 1 s with 150,000 words. Raises BadGrammar."""
    path = directory / "tokenizer.json"
    is_dummy = needs_dummy_tokenizer(directory, load_format)
    if not (path.is_file() or is_dummy) or not eos_token_ids:
        missing = "tokenizer.json" if eos_token_ids else "end-of-sequence token"
        raise BadGrammar(f"this model has no {missing}, which structured output needs")
    if is_dummy:
        text = dummy_tokenizer(vocab_size).to_str()
    else:
        text = _with_marks(path.read_text(encoding="utf-8"))
    return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))


def _with_marks(tokenizer: str) -> str:
    """With the tokens around thoughts as special ones: then no text of a grammar matches them.

    Some models have them as plain ones, so that they show.
    """
    if not any(mark in tokenizer for mark in _THOUGHT_MARKS):
        return tokenizer
    spec = json.loads(tokenizer)
    for token in spec.get("added_tokens") or ():
        token["special"] |= token["content"] in _THOUGHT_MARKS
    return json.dumps(spec, ensure_ascii=False)


def _first_line(message: str) -> str:
    return (message.strip().splitlines() or ["it allows no text"])[0][:300]


class _Constraint(NamedTuple):
    """to_the_end: see `SamplingParams.grammar_to_the_end`."""

    matcher: LLMatcher
    stop_token_ids: frozenset[int]
    to_the_end: bool


class GrammarTable:
    """A matcher and a mask for each slot whose request has a grammar.

    A step goes: `assign` for its new sequences, `start` before the model runs, `wait` when its
    logits are there, `advance` with what was sampled. All that a matcher has to do, it does in a
    thread between `start` and `wait`, while the model runs: it takes in the id that was sampled
    last, and computes its mask. So that id must be on the host by then: an executor that runs ahead
    must wait for the step before where it starts one with a constrained row.
    """

    def __init__(self, grammars: Grammars, max_num_seqs: int, vocab_size: int) -> None:
        self._grammars = grammars
        self.words_per_row = -(-vocab_size // 32)
        self._memory = (ctypes.c_int32 * (max_num_seqs * self.words_per_row))()
        self._bytes = memoryview(self._memory).cast("B")  # words are little-endian, as llguidance's
        self._nothing = bytes(4 * self.words_per_row)
        self._max_num_seqs = max_num_seqs
        self._constraints: dict[int, _Constraint] = {}
        self._said: dict[int, int] = {}  # by slot, what its matcher has not taken in yet
        self._failed: set[int] = set()
        self._executor = LLExecutor()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._pending: Future[None] | None = None

    @property
    def memory(self) -> "ctypes.Array[ctypes.c_int32]":
        """(max_num_seqs, words_per_row): bit i % 32 of word i // 32 says whether id i may come."""
        return self._memory

    def compile(self, sampling: SamplingParams) -> "Future[LLMatcher] | None":
        """Begins what `assign` will need; None where there is nothing to wait for."""
        if sampling.grammar is None:
            return None
        future = self._grammars.compile(sampling.grammar)
        return None if future.done() and not future.exception() else future

    def assign(self, assignment: SlotAssignment) -> None:
        """A sequence enters its slot; after a preemption, with all that it has said already."""
        slot = assignment.slot
        self._constraints.pop(slot, None)
        self._said.pop(slot, None)
        self._failed.discard(slot)
        sampling = assignment.sampling
        if sampling.grammar is None:
            return
        # Compiled when the request came in; at most it has fallen out of the cache since.
        try:
            matcher = self._grammars.compile(sampling.grammar).result().deep_copy()
        except BadGrammar:
            self._failed.add(slot)
            return
        said = assignment.token_ids[assignment.num_prompt_tokens :]
        if said and not matcher.consume_tokens(list(said)):
            self._failed.add(slot)
        stop_token_ids = frozenset(sampling.stop_token_ids)
        self._constraints[slot] = _Constraint(matcher, stop_token_ids, sampling.grammar_to_the_end)

    def start(self, slots: Iterable[int]) -> None:
        """Begins to compute the masks of those of the slots that have a grammar."""
        constrained = [slot for slot in slots if slot in self._constraints]
        if constrained:
            self._pending = self._worker.submit(self._fill, constrained)

    def wait(self) -> None:
        """From here on the masks that were started are in `memory`."""
        if self._pending:
            self._pending.result()
            self._pending = None

    def is_constrained(self, slot: int) -> bool:
        return slot in self._constraints

    def constrains_any(self, slots: Iterable[int]) -> bool:
        return not self._constraints.keys().isdisjoint(slots)

    def must_end(self, slot: int) -> bool:
        """Whether nothing can follow but the end: then it comes, whatever else forbids it."""
        return slot in self._constraints and self._constraints[slot].matcher.is_stopped()

    def advance(self, slots: list[int], token_ids: list[int]) -> frozenset[int]:
        """Takes in what was sampled; returns the rows whose grammar has failed.

        It fails where it runs out of fuel, and where nothing was left to sample that it allows.
        """
        if not self._constraints and not self._failed:
            return frozenset()
        failed = []
        for row, (slot, token_id) in enumerate(zip(slots, token_ids, strict=True)):
            constraint = self._constraints.get(slot)
            if slot in self._failed:
                failed.append(row)
            elif constraint is None:
                continue
            elif not self._allows(slot, token_id):
                failed.append(row)
            elif token_id not in constraint.stop_token_ids:
                self._said[slot] = token_id
        return frozenset(failed)

    def allowed_ids(self, slot: int) -> list[int]:
        """As the mask says; slow."""
        return [i for i in range(32 * self.words_per_row) if self._allows(slot, i)]

    def _allows(self, slot: int, token_id: int) -> bool:
        byte = self._bytes[4 * self.words_per_row * slot + token_id // 8]
        return bool(byte >> token_id % 8 & 1)

    def _fill(self, slots: list[int]) -> None:
        """In the thread. What a matcher cannot take in, it answers with a mask of nothing."""
        pairs = [(self._constraints[slot].matcher, slot) for slot in slots]
        address, num_bytes = ctypes.addressof(self._memory), 4 * self.words_per_row
        said = self._said
        if len(slots) * self.words_per_row >= _MIN_PARALLEL_WORDS:
            if heard := [(matcher, said.pop(slot)) for matcher, slot in pairs if slot in said]:
                self._executor.consume_token_par(heard)
            self._executor.unsafe_compute_mask_ptr(pairs, address, num_bytes, self._max_num_seqs)
        else:
            for matcher, slot in pairs:
                if slot in said:
                    matcher.consume_token(said.pop(slot))
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
