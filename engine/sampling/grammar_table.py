"""`GrammarTable`: the ids that each constrained row of an executor may have next."""

import ctypes
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from llguidance import LLExecutor, LLMatcher

from penstock.engine.config import EngineConfig
from penstock.engine.sampling.grammar import GrammarCompiler, Grammars, OpenGrammars
from penstock.scheduler.types import Request, RequestId, SlotAssignment

# Mask words from which on several threads are used: 8 rows of 128,000 ids.
_MIN_PARALLEL_WORDS = 1 << 15


class Constraint(NamedTuple):
    """to_the_end: see `SamplingParams.grammar_to_the_end`."""

    grammar: str
    matcher: LLMatcher
    stop_token_ids: frozenset[int]
    to_the_end: bool


class GrammarTable:
    """A matcher and a mask for each slot whose request has a grammar.

    Of a request, once: `prepare`, whose future must be done before its first `assign`, and
    `release`. In a step: `assign` for its new sequences, `start` before the model runs, `wait` when
    its logits are ready, `advance` with the sampled ids. Matchers work in a thread between `start`
    and `wait`, while the model runs: each consumes the id that was sampled last, and computes its
    mask. That id must be on the host by then: an executor that runs ahead must wait for the
    previous step before it starts one with a constrained row.
    """

    def __init__(self, grammars: Grammars, max_num_seqs: int, vocab_size: int) -> None:
        self._open = OpenGrammars(grammars)
        self._eos_token_ids = grammars.eos_token_ids
        self.words_per_row = -(-vocab_size // 32)
        self.memory = (ctypes.c_int32 * (max_num_seqs * self.words_per_row))()
        """(max_num_seqs, words_per_row): bit i % 32 of word i // 32 is set if id i is allowed."""
        self._bytes = memoryview(self.memory).cast("B")  # words are little-endian, as llguidance's
        self._nothing = bytes(4 * self.words_per_row)
        self._max_num_seqs = max_num_seqs
        self._constraints: dict[int, Constraint] = {}
        self._unconsumed: dict[int, int] = {}  # by slot, the id that its matcher has yet to consume
        self._failed: set[int] = set()
        self._executor = LLExecutor()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._pending: Future[None] | None = None

    def prepare(self, request: Request) -> "Future[LLMatcher] | None":
        """Starts compiling what `assign` will need; None if there is nothing to wait for."""
        if request.sampling.grammar is None:
            return None
        future = self._open.open(request.id, request.sampling)
        return None if future.done() and not future.exception() else future

    def release(self, request_id: RequestId) -> None:
        """The request has ended: it has no more assignments."""
        self._open.close(request_id)
        # A matcher holds its grammar in memory, and its slot may stay empty for long.
        for slot, constraint in list(self._constraints.items()):
            if not self._open.has(constraint.grammar):
                self._vacate(slot)

    def assign(self, assignment: SlotAssignment) -> None:
        """A sequence enters its slot; after a preemption, with the output it already has."""
        slot = assignment.slot
        self._vacate(slot)
        sampling = assignment.sampling
        if sampling.grammar is None:
            return
        matcher = self._open.matcher(sampling.grammar).deep_copy()
        # Half a microsecond for each, so it need not be done before the step.
        output_ids = assignment.token_ids[assignment.num_prompt_tokens :]
        if output_ids and not matcher.consume_tokens(list(output_ids)):
            self._failed.add(slot)
        stop_token_ids = frozenset(sampling.stop_token_ids)
        self._constraints[slot] = Constraint(
            sampling.grammar, matcher, stop_token_ids, sampling.grammar_to_the_end
        )

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
        """Those of the sequences that have these slots now."""
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

    def forced(self, slots: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """By row, the ids that come next in those slots whose grammar leaves no choice of text. To
        be called after `advance`."""
        found: dict[int, tuple[int, ...]] = {}
        if not self._constraints:
            return found
        for row, slot in enumerate(slots):
            constraint = self._constraints.get(slot)
            if constraint is None or slot in self._failed:
                continue
            matcher = constraint.matcher
            if slot in self._unconsumed:
                matcher.consume_token(self._unconsumed.pop(slot))
            if token_ids := matcher.compute_ff_tokens():
                found[row] = tuple(token_ids)
        return found

    def choose(self, slot: int, token_id: int, number: int) -> int:
        """The id if its mask allows it or nothing, else an allowed one, by any number."""
        row = self._row(slot)
        if not self._allows(slot, token_id) and (num_allowed := _num_set(row)):
            return _nth_set(row, number % num_allowed)
        return token_id

    def _vacate(self, slot: int) -> None:
        self._constraints.pop(slot, None)
        self._unconsumed.pop(slot, None)
        self._failed.discard(slot)

    def _allows(self, slot: int, token_id: int) -> bool:
        byte = self._bytes[4 * self.words_per_row * slot + token_id // 8]
        return bool(byte >> token_id % 8 & 1)

    def _fill(self, slots: list[int]) -> None:
        """Runs in the thread. A matcher that cannot consume an id gives an empty mask."""
        pairs = [(self._constraints[slot].matcher, slot) for slot in slots]
        address, num_bytes = ctypes.addressof(self.memory), 4 * self.words_per_row
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
        allowed = [i for i in self._eos_token_ids if self._allows(slot, i)]
        for token_id in allowed:
            row[token_id // 8] ^= 1 << token_id % 8
        if row == self._nothing:
            for token_id in allowed:
                row[token_id // 8] ^= 1 << token_id % 8

    def _row(self, slot: int) -> memoryview:
        num_bytes = 4 * self.words_per_row
        return self._bytes[slot * num_bytes : (slot + 1) * num_bytes]


def _num_set(row: memoryview) -> int:
    return int.from_bytes(row, "little").bit_count()


def _nth_set(row: memoryview, n: int) -> int:
    """The place of the bit before which n are set, by halving."""
    first, last = 0, len(row)
    while last - first > 1:
        middle = (first + last) // 2
        if n < (num_before := _num_set(row[first:middle])):
            last = middle
        else:
            first, n = middle, n - num_before
    return 8 * first + [bit for bit in range(8) if row[first] >> bit & 1][n]


def load_grammars(
    config: EngineConfig,
    model_dir: Path,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    *,
    samples: bool = True,
) -> GrammarTable:
    """Makes the grammars of an executor. samples: whether this rank does; the others need no
    tokenizer."""
    grammars = Grammars(GrammarCompiler(model_dir, vocab_size, eos_token_ids, config.load_format))
    if samples:
        grammars.load_tokenizer()
    return GrammarTable(grammars, config.scheduler.max_num_seqs, vocab_size)
