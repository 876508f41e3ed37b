"""`AwaitedIds`: where sampled ids belong that a rank learns from rank 0 some steps later."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Self

from penstock.scheduler.types import SampledTokens, ScheduledBatch


class StepIds(NamedTuple):
    """What a step sampled: the first id of each row, and by row those after accepted drafts."""

    token_ids: Sequence[int]
    further: Mapping[int, Sequence[int]] = {}

    @classmethod
    def of(cls, sampled: SampledTokens) -> Self:
        further = {row: each.token_ids for row, each in sampled.further.items()}
        return cls(sampled.token_ids, further)

    @property
    def num_accepted(self) -> list[int]:
        """Drafts of each row, up to the last that has any."""
        num_rows = 1 + max(self.further, default=-1)
        return [len(self.further.get(row, ())) for row in range(num_rows)]


class AwaitedIds:
    """Knows the places of the steps that were launched and not yet told of, in their order."""

    def __init__(self) -> None:
        self._steps: deque[list[tuple[int, int] | None]] = deque()

    def launched(self, batch: ScheduledBatch) -> None:
        # Of a decode one token is known, whatever drafts follow it.
        num_known = [1] * batch.num_decodes + list(batch.num_tokens[batch.num_decodes :])
        rows = zip(batch.slots, batch.starts, num_known, batch.samples, strict=True)
        self._steps.append([(slot, at + num) for slot, at, num, samples in rows if samples])

    def assigned(self, batch: ScheduledBatch) -> None:
        """Whatever had a slot that the batch assigns has ended or left it, maybe while a step
        sampled it: that id is of nobody any more."""
        slots = {assignment.slot for assignment in batch.assignments}
        if not slots:
            return
        for places in self._steps:
            for row, place in enumerate(places):
                if place is not None and place[0] in slots:
                    places[row] = None

    def told(self, sampled: Sequence[StepIds]) -> Iterator[tuple[int, int, int]]:
        """The slot, the position and the id of each that belongs to a sequence. sampled: of the
        oldest steps, in their order; a row without an id has a negative one, which becomes 0."""
        for token_ids, further in sampled:
            places = self._steps.popleft()
            for row, (place, first) in enumerate(zip(places, token_ids, strict=True)):
                if place is None:
                    continue
                slot, length = place
                for position, token_id in enumerate((first, *further.get(row, ())), length):
                    yield slot, position, max(0, token_id)
