"""`Inserts`: which images are encoded, in which steps and for how long, and whose rows are kept.

An insert that no cached prefix has is encoded before a chunk reaches it. Tokens before it, and all
other sequences, go on meanwhile: a step gives encoding no more time than its decodes can spare.
Equal inserts of any requests are encoded once. Rows are kept while a sequence is about to read
them, and others until the memory for them is full, the least recently used dropped first.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import ImageTooLarge
from penstock.scheduler.groups import KVGroup, StateGroup
from penstock.scheduler.types import Encode, Insert, Request, RequestId, SampledTokens

# Of a step, where others wait for its end and no target says how long they may.
SLICE_S = 0.02
# Where nobody does: so late, at most, a request that arrives is heard.
_ALONE_S = 0.05
# So that encoding goes on under a target that cannot be met.
_LEAST_S = 0.002
# Inserts of a step: the device has enough to do.
_MOST = 8
# What is known of the time that an operation takes weighs so much when another insert is encoded.
_MEMORY = 0.9


class EncoderCosts(NamedTuple):
    """Of the executor's encoder. bytes_per_token: of rows. cache_bytes: for rows that are kept.
    operation_s: expected until an insert has been encoded."""

    bytes_per_token: int
    cache_bytes: int
    operation_s: float = 0.0


class Inserts:
    """See the module."""

    def __init__(self, costs: EncoderCosts, most_at_once: int) -> None:
        self._costs = costs
        self._most_at_once = most_at_once
        self._kept = OrderedDict[bytes, int]()  # complete: their bytes, the last used last
        self._begun: dict[bytes, tuple[int, int]] = {}  # the step of that, and their bytes
        self._open: dict[RequestId, tuple[Insert, ...]] = {}
        self._needed = Counter[bytes]()  # by open requests
        self._dropped: list[bytes] = []
        self._had_share = False
        self._operations = self._seconds = self._spent_s = 0.0
        self._num_queries = self._num_hits = 0
        self._total_s = 0.0

    @property
    def stats(self) -> dict[str, Any]:
        """Fields of `SchedulerStats`. Queries: inserts of requests that began to run; hits: those
        of them that the cached prefix had, or that were encoded or begun for another."""
        return {
            "encoder_queries_total": self._num_queries,
            "encoder_hits_total": self._num_hits,
            "encoder_seconds_total": self._total_s,
        }

    # Requests, as they come and go.

    def check(self, request: Request) -> None:
        """Raises ImageTooLarge."""
        for each in request.inserts:
            if each.is_whole and each.num_tokens > self._most_at_once:
                raise ImageTooLarge(each.num_tokens, self._most_at_once)

    def open(self, request: Request) -> None:
        if request.inserts:
            self._open[request.id] = request.inserts
            self._needed.update(each.digest for each in request.inserts)

    def close(self, request_id: RequestId) -> None:
        """What was begun for it alone is dropped."""
        for each in self._open.pop(request_id, ()):
            self._needed[each.digest] -= 1
            if not self._needed[each.digest]:
                del self._needed[each.digest]
                if self._begun.pop(each.digest, None):
                    self._dropped.append(each.digest)

    def count_first_step(self, sequence: Sequence, num_cached: int) -> None:
        for each in sequence.request.inserts:
            self._num_queries += 1
            known = each.digest in self._kept or each.digest in self._begun
            self._num_hits += known or each.end <= num_cached

    # What a chunk may have.

    def at_once(self, sequence: Sequence) -> int:
        """How many of its next tokens must be in one chunk: those of an insert that is whole."""
        for each in _next(sequence):
            is_here = each.is_whole and each.start == sequence.num_computed
            return each.num_tokens if is_here and each.digest in self._kept else 0
        return 0

    def num_computable(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of its next num_tokens tokens may be a chunk, which ends before an insert that
        is not encoded, and not inside one that is whole."""
        position = sequence.num_computed
        end = position + num_tokens
        for each in _next(sequence):
            if each.start >= end:
                break
            if each.digest not in self._kept or (each.is_whole and each.end > end):
                end = max(position, each.start)
                break
            self._kept.move_to_end(each.digest)
        return end - position

    # What a step encodes.

    def drop_least_used(self, prefilling: Iterable[Sequence]) -> None:
        """Before a step is planned, whose chunks may read all that is kept."""
        num_bytes = sum(self._kept.values())
        if num_bytes <= self._costs.cache_bytes:
            return
        is_next = self._about_to_be_read(prefilling)
        for digest in [each for each in self._kept if each not in is_next]:
            num_bytes -= self._kept.pop(digest)
            self._dropped.append(digest)
            if num_bytes <= self._costs.cache_bytes:
                return

    def take_dropped(self) -> tuple[bytes, ...]:
        """Those since the last call."""
        dropped, self._dropped = self._dropped, []
        return tuple(dropped)

    def share(self, prefilling: Iterable[Sequence]) -> float:
        """Of what decodes leave of a step under a target: how much is for chunks."""
        self._had_share = self.is_wanted(prefilling)
        return 0.5 if self._had_share else 1.0

    def is_wanted(self, prefilling: Iterable[Sequence]) -> bool:
        return any(each.digest not in self._kept for one in prefilling for each in _next(one))

    def encodes(
        self, step: int, prefilling: Items[Sequence], left_s: float | None, *, is_alone: bool
    ) -> tuple[Encode, ...]:
        """Says what the step encodes. prefilling: the sequences that compute prompts, in the order
        in which they are served. left_s: what the step's other work leaves of a target; None
        without. is_alone: nobody waits for the end of the step."""
        budget_s = _ALONE_S if is_alone else SLICE_S if left_s is None else max(left_s, _LEAST_S)
        if left_s is not None and left_s < _LEAST_S and not self._had_share:
            return ()  # the sequence began with this step, and chunks have all of it
        is_next = self._about_to_be_read(prefilling)
        room = self._costs.cache_bytes - sum(self._kept[each] for each in is_next)
        room -= sum(num_bytes for _, num_bytes in self._begun.values())
        encodes: dict[bytes, Encode] = {}
        for sequence in prefilling:
            for index, each in enumerate(sequence.request.inserts):
                digest = each.digest
                if each.end <= sequence.num_computed or digest in self._kept or digest in encodes:
                    continue
                if digest not in self._begun:
                    num_bytes = each.num_tokens * self._costs.bytes_per_token
                    # Where nothing is about to be read, room can come from nowhere else.
                    if num_bytes > room and (encodes or is_next):
                        return tuple(encodes.values())
                    room -= num_bytes
                    self._begun[digest] = step, num_bytes
                encodes[digest] = Encode(sequence.request.id, index, budget_s)
                if len(encodes) == _MOST:
                    return tuple(encodes.values())
        return tuple(encodes.values())

    def update(self, sampled: SampledTokens) -> None:
        """Takes the results of a step."""
        self._spent_s += sampled.encoding_s
        self._total_s += sampled.encoding_s
        operations = 0
        for request_id, index in sampled.encoded:
            if request_id not in self._open:
                continue
            each = self._open[request_id][index]
            step, num_bytes = self._begun.get(each.digest, (sampled.step + 1, 0))
            if step <= sampled.step:  # else it was dropped, and begun again, since that step
                del self._begun[each.digest]
                self._kept[each.digest] = num_bytes
                operations += each.operations
        if operations:
            self._operations = _MEMORY * self._operations + operations
            self._seconds = _MEMORY * self._seconds + self._spent_s
            self._spent_s = 0.0

    def seconds_of(self, sequences: Iterable[tuple[Sequence, int]]) -> float:
        """How long it takes to encode what these have to. Each with how many of its tokens are
        cached or computed."""
        operation_s = self._costs.operation_s
        if self._operations:
            operation_s = self._seconds / self._operations
        missing = {
            each.digest: each.operations
            for sequence, num_computed in sequences
            for each in sequence.request.inserts
            if each.end > num_computed and each.digest not in self._kept
        }
        return operation_s * sum(missing.values())

    def _about_to_be_read(self, prefilling: Iterable[Sequence]) -> set[bytes]:
        """The digest of each sequence's next insert, if it is encoded."""
        nexts = (next(_next(sequence), None) for sequence in prefilling)
        return {each.digest for each in nexts if each and each.digest in self._kept}


def most_at_once(
    config: SchedulerConfig, groups: Iterable[KVGroup | StateGroup], block_size: int
) -> int:
    """The most tokens of one prompt that any step has room for: in its tokens, and in the blocks of
    layers with a window."""
    return min(
        [
            config.max_step_tokens - config.max_num_seqs + 1,
            *[
                (each.num_blocks - 2) * block_size - each.window
                for each in groups
                if isinstance(each, KVGroup) and each.window is not None
            ],
        ]
    )


def _next(sequence: Sequence) -> Iterator[Insert]:
    """Those of its inserts that are not computed."""
    return (each for each in sequence.request.inserts if each.end > sequence.num_computed)
