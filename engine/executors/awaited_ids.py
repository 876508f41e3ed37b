"""`AwaitedIds`: where sampled ids belong that a rank learns from rank 0 some steps later."""

from collections import deque
from collections.abc import Iterator, Sequence

from penstock.scheduler.types import ScheduledBatch


class AwaitedIds:
    """Knows the places of the steps that were launched and not yet told of, in their order."""

    def __init__(self) -> None:
        self._steps: deque[list[tuple[int, int] | None]] = deque()

    def launched(self, batch: ScheduledBatch) -> None:
        rows = zip(batch.slots, batch.starts, batch.num_tokens, batch.samples, strict=True)
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

    def told(self, sampled: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
        """The slot, the position and the id of each that belongs to a sequence. sampled: of the
        oldest steps, in their order; a row without an id has a negative one, which becomes 0."""
        for token_ids in sampled:
            for place, token_id in zip(self._steps.popleft(), token_ids, strict=True):
                if place is not None:
                    yield *place, max(0, token_id)
