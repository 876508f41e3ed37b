"""Which sequence is admitted next, which is preempted, and when a batch may admit."""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.config import Batching, SchedulerConfig
from penstock.scheduler.types import FurtherTokens

# Static and dynamic batching start a batch when it is full, or when its oldest request has waited
# this long, so that none waits for ever. 50 ms is a usual maximum delay of dynamic batchers; a
# static one waits for its fixed size, unless traffic stops.
BATCH_WAIT_S = {Batching.DYNAMIC: 0.05, Batching.STATIC: 1.0}

# At least one of so many admissions under the priority policy is of the sequence that has waited
# longest, whatever its priority: so one with k older ones before it waits for at most 8 (k + 1).
_OLDEST_EVERY = 8

_FEW = 16  # of a heap's entries, which begins with its least
_SWEEP_MIN = 64  # ended entries that are not worth a pass over the queue


class OrderedQueue:
    """Waiting sequences by a rank that each keeps. One that has left is skipped when met."""

    def __init__(self, rank: Callable[[Sequence], int] = lambda _: 0) -> None:
        """rank: the lowest is first; among equals, the first to arrive."""
        self._rank = rank
        self._heap: list[tuple[int, int, int, Sequence]] = []
        self._members: dict[Sequence, None] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return iter(self._members)

    def push(self, sequence: Sequence) -> None:
        # The number makes entries differ: a sequence may have left and come again.
        self._num_pushed += 1
        entry = (self._rank(sequence), sequence.order, self._num_pushed, sequence)
        heapq.heappush(self._heap, entry)
        self._members[sequence] = None

    def peek(self) -> Sequence | None:
        """The next one. The same until one is pushed or removed."""
        heap, members = self._heap, self._members
        while heap and heap[0][3] not in members:
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    def remove(self, sequence: Sequence) -> None:
        """Its entry stays and is skipped when met. When most entries have left, they are removed
        together: amortized O(1) each."""
        del self._members[sequence]
        if self._heap[0][3] is sequence:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._members) + _SWEEP_MIN:
            self._heap = [entry for entry in self._heap if entry[3] in self._members]
            heapq.heapify(self._heap)

    def next_few(self) -> list[Sequence]:
        """Some of the first, in no particular order."""
        few = dict.fromkeys(entry[3] for entry in self._heap[:_FEW])
        return [each for each in few if each in self._members]

    def are_ahead(self, sequence: Sequence) -> Iterable[Sequence]:
        """Those that are to be admitted before this one, which waits or may be about to."""
        rank = (self._rank(sequence), sequence.order)
        return (each for each in self._members if (self._rank(each), each.order) < rank)


class WaitingQueue(OrderedQueue):
    """Waiting sequences in the order of a policy: first come, first served. A preempted sequence
    keeps its rank, so it is admitted before all that arrived after it."""

    def pop(self) -> Sequence:
        """Removes the next one, which is admitted."""
        sequence = self.peek()
        assert sequence is not None, "the queue is empty"
        self.remove(sequence)
        return sequence

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """The sequence to preempt: of the lowest standing, and among equals the cheapest to
        recompute.

        So one of the highest standing with the most computed tokens always continues: memory
        pressure slows the others but never stops all.
        """
        return min(running, key=lambda seq: (self.standing(seq), seq.num_computed, -seq.order))

    def standing(self, sequence: Sequence) -> float:
        """How strong the claim of a running sequence to go on is."""
        return 0.0

    # A policy that divides the service between tenants does more here; others do nothing.

    fairness: float | None = None
    """The fairness index, from 0 to 1."""

    def open(self, tenant: str, num_sequences: int) -> None:
        """A request of this tenant arrives."""

    def close(self, tenant: str, num_sequences: int = 1) -> None:
        """Sequences of this tenant have ended."""

    def begin_step(self, now: float) -> None:
        """The next step is about to be scheduled."""

    def on_run(self, sequence: Sequence) -> None:
        """It is admitted."""

    def on_leave(self, sequence: Sequence) -> None:
        """It no longer runs."""

    def on_chunk(self, sequence: Sequence, num_tokens: int, num_again: int) -> None:
        """It runs so many tokens of its prompt, num_again of them for a second time."""

    def charge_cached(self, sequence: Sequence, num_tokens: int) -> None:
        """It begins with so many tokens that need not be computed."""

    def charge_outputs(
        self, sampling: Iterable[Sequence], further: Mapping[int, FurtherTokens]
    ) -> None:
        """These have had a token each, and by their number some further ones."""

    def counter_of(self, sequence: Sequence) -> float:
        """The service that its tenant has had."""
        return 0.0

    def most_of(self, sequence: Sequence) -> float:
        """The most of its prompt's tokens that the step may run yet."""
        return math.inf

    def in_order(self, running: Iterable[Sequence]) -> list[Sequence]:
        """In the order in which their prompts go on."""
        return list(running)

    def not_yielding(self, running: Iterable[Sequence], sequence: Sequence) -> list[Sequence]:
        """Those whose chunks make no room for a sequence that arrives."""
        return list(running)


class PriorityQueue(WaitingQueue):
    """The lowest `priority` first, and now and then the oldest, so that none waits for ever."""

    def __init__(self) -> None:
        super().__init__(lambda sequence: sequence.request.priority)
        self._by_age = OrderedQueue()
        self._num_passed = 0  # admissions since the oldest was admitted

    def push(self, sequence: Sequence) -> None:
        super().push(sequence)
        self._by_age.push(sequence)

    def peek(self) -> Sequence | None:
        is_due = self._num_passed >= _OLDEST_EVERY - 1
        return self._by_age.peek() if is_due else super().peek()

    def pop(self) -> Sequence:
        oldest, first = self._by_age.peek(), super().peek()
        sequence = super().pop()
        if sequence is not oldest:
            self._num_passed += 1
            return sequence
        self._num_passed = 0
        if sequence is not first:
            sequence.is_overdue = True
        return sequence

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        self._by_age.remove(sequence)

    def standing(self, sequence: Sequence) -> float:
        """By its priority; one that was admitted because it had waited longest has the highest."""
        return math.inf if sequence.is_overdue else -sequence.request.priority


def may_start_batch(
    config: SchedulerConfig, waiting: WaitingQueue, num_running: int, now: float
) -> bool:
    """Whether new sequences may be admitted now.

    Continuous batching: at every step. Static and dynamic: only when the batch before has ended,
    and then as a full batch, or with what is waiting once the oldest has waited long enough.
    """
    if config.batching is Batching.CONTINUOUS:
        return True
    oldest = waiting.peek()
    waited_s = now - oldest.request.arrival_s if oldest else 0.0
    is_due = len(waiting) >= config.max_num_seqs or waited_s >= BATCH_WAIT_S[config.batching]
    return num_running == 0 and is_due
