"""`InsertTable`: what an executor has of inserts: contents, encodings that are begun, and rows."""

from collections.abc import Callable
from time import perf_counter

from penstock.engine.encoders.encoder import Encoder, Encoding, InsertRows
from penstock.scheduler.errors import NoEncoder
from penstock.scheduler.types import Insert, Request, RequestId, ScheduledBatch


class InsertTable:
    """Equal digests are one insert. One thread uses it."""

    def __init__(self, encoder: Encoder | None, clock: Callable[[], float] = perf_counter) -> None:
        """encoder: None where inserts are refused."""
        self._encoder = encoder
        self._clock = clock
        self._inserts: dict[RequestId, tuple[Insert, ...]] = {}
        self._encodings: dict[bytes, Encoding] = {}
        self._rows: dict[bytes, InsertRows] = {}

    def prepare(self, request: Request) -> None:
        """Keeps the contents of its inserts. Raises NoEncoder."""
        if request.inserts:
            if self._encoder is None:
                raise NoEncoder
            self._inserts[request.id] = request.inserts

    def release(self, request_id: RequestId) -> None:
        self._inserts.pop(request_id, None)

    def drop(self, batch: ScheduledBatch) -> None:
        for digest in batch.dropped:
            self._encodings.pop(digest, None)
            self._rows.pop(digest, None)

    def rows_of(self, insert: Insert) -> InsertRows:
        return self._rows[insert.digest]

    def encode(self, batch: ScheduledBatch) -> tuple[tuple[tuple[RequestId, int], ...], float]:
        """Returns which of the step's encodes are complete, and the seconds that it took."""
        if not batch.encodes:
            return (), 0.0
        assert self._encoder is not None
        began_s, done = self._clock(), []
        for number, (request_id, index, budget_s) in enumerate(batch.encodes):
            left_s = budget_s - (self._clock() - began_s)
            insert = self._inserts[request_id][index]
            if insert.digest not in self._rows:
                if number and left_s <= 0:
                    break
                encoding = self._encodings.get(insert.digest)
                if encoding is None:
                    encoding = self._encodings[insert.digest] = self._encoder.begin(insert)
                if not encoding.run(left_s):
                    break
                self._rows[insert.digest] = encoding.rows
                del self._encodings[insert.digest]
            done.append((request_id, index))
        return tuple(done), self._clock() - began_s
