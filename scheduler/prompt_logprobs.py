"""Log probabilities of the tokens of prompts, as they travel: in columns of bytes."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self


class PromptLogprobs(NamedTuple):
    """Log probabilities at one prompt position, given the tokens before it.

    logprob, rank: of the prompt's token; rank 1 is the most likely one. top: (token id, logprob) of
    the most likely, in falling order.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PackedLogprobs:
    """Those of many positions. To make, send and read the twenty best of 100,000 positions as
    objects takes a second, in which no stream would go on; so a reader unpacks some at a time.

    num_top: of each position. logprobs, ranks, top_ids, top_logprobs: float32 or int32 in the
    machine's byte order; of the last two, num_top for each position.
    """

    num_top: int = 0
    logprobs: bytes = b""
    ranks: bytes = b""
    top_ids: bytes = b""
    top_logprobs: bytes = b""

    @classmethod
    def of(cls, rows: Iterable[PromptLogprobs]) -> Self:
        """All rows have as many likeliest tokens."""
        rows = list(rows)
        pairs = [pair for row in rows for pair in row.top]
        return cls(
            len(rows[0].top) if rows else 0,
            array("f", [row.logprob for row in rows]).tobytes(),
            array("i", [row.rank for row in rows]).tobytes(),
            array("i", [token_id for token_id, _ in pairs]).tobytes(),
            array("f", [logprob for _, logprob in pairs]).tobytes(),
        )

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """One after the other; all that are not empty have the same num_top."""
        return cls(
            max((part.num_top for part in parts), default=0),
            b"".join(part.logprobs for part in parts),
            b"".join(part.ranks for part in parts),
            b"".join(part.top_ids for part in parts),
            b"".join(part.top_logprobs for part in parts),
        )

    def __len__(self) -> int:
        return len(self.ranks) // 4

    def __iter__(self) -> Iterator[PromptLogprobs]:
        return iter(self[:])

    def __getitem__(self, index: slice) -> list[PromptLogprobs]:
        """A slice has step 1."""
        start, end, _ = index.indices(len(self))
        n, end = self.num_top, max(start, end)
        logprobs = memoryview(self.logprobs).cast("f")[start:end].tolist()
        ranks = memoryview(self.ranks).cast("i")[start:end].tolist()
        top_ids = memoryview(self.top_ids).cast("i")[start * n : end * n].tolist()
        top = memoryview(self.top_logprobs).cast("f")[start * n : end * n].tolist()
        pairs = list(zip(top_ids, top, strict=True))
        return [
            PromptLogprobs(logprob, rank, tuple(pairs[i * n : (i + 1) * n]))
            for i, (logprob, rank) in enumerate(zip(logprobs, ranks, strict=True))
        ]
