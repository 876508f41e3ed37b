"""Which sequence is admitted next, which is preempted, and when a batch may admit."""

import heapq
from collections.abc import Iterable

from penstock.scheduler.config import Batching, Policy
from penstock.scheduler.sequence import Sequence, Status

# Static and dynamic batching start a batch when it is full, or when its oldest request has waited
# this long, so that none waits for ever. 50 ms is a usual maximum delay of dynamic batchers; a
# static one waits for its fixed size, unless traffic stops.
BATCH_WAIT_S = {Batching.DYNAMIC: 0.05, Batching.STATIC: 1.0}

_SWEEP_MIN = 64  # ended entries that are not worth a pass over the queue

Rank = tuple[int, int]


class WaitingQueue:
    """Waiting sequences in policy order. One that ended while it waited is skipped when met.

    A preempted sequence keeps its rank, so it is admitted before all that arrived after it.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[Rank, Sequence]] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (self._rank(sequence), sequence))
        self._num_waiting += 1

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][1].status is Status.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        sequence = self.peek()
        assert sequence is not None, "the queue is empty"
        heapq.heappop(self._heap)
        self._num_waiting -= 1
        return sequence

    def discard(self) -> None:
        """A sequence in the queue is about to end. Its entry stays and is skipped when met.

        When most entries have ended, they are removed together: amortized O(1) each.
        """
        self._num_waiting -= 1
        if len(self._heap) > 2 * self._num_waiting + _SWEEP_MIN:
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapq.heapify(self._heap)

    def _rank(self, sequence: Sequence) -> Rank:
        """Unique: it ends in `order`, in which all sequences differ."""
        is_ranked = self._policy is Policy.PRIORITY
        return (sequence.request.priority if is_ranked else 0, sequence.order)


def victim(running: Iterable[Sequence], policy: Policy) -> Sequence:
    """The sequence to preempt: of the lowest priority, among equals the cheapest to recompute.

    The one with the most computed tokens of the highest priority is preempted last, so it always
    continues: memory pressure slows the others but never stops all.
    """
    is_ranked = policy is Policy.PRIORITY
    return min(
        running,
        key=lambda seq: (-seq.request.priority if is_ranked else 0, seq.num_computed, -seq.order),
    )


def may_start_batch(
    batching: Batching, num_running: int, num_waiting: int, waited_s: float, max_num_seqs: int
) -> bool:
    """Whether new sequences may be admitted now.

    Continuous batching: at every step. Static and dynamic: only when the batch before has ended,
    and then as a full batch, or with what is waiting once the oldest has waited long enough.
    """
    if batching is Batching.CONTINUOUS:
        return True
    is_due = num_waiting >= max_num_seqs or waited_s >= BATCH_WAIT_S[batching]
    return num_running == 0 and is_due
