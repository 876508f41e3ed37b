"""The special tokens that a tokenizer puts around a text, or around two and between them: apart
from the texts, so that these can be cut and keep them."""

from dataclasses import dataclass
from typing import Self

from tokenizers import Tokenizer

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """num_first: how many of those between two texts are of the first one's segment; None where a
    model is told no segments."""

    before: Ids = ()
    between: Ids = ()
    after: Ids = ()
    num_first: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, are_two: bool = False) -> Self:
        encoding = tokenizer.encode("a", "a" if are_two else None)
        ids, texts, segments = encoding.ids, encoding.sequence_ids, encoding.type_ids
        first = [index for index, text in enumerate(texts) if text == 0] or [len(ids)]
        second = [index for index, text in enumerate(texts) if text == 1] or first
        between = slice(first[-1] + 1, second[0])
        has_segments = second[0] < len(ids) and segments[second[0]] > 0
        return cls(
            before=tuple(ids[: first[0]]),
            between=tuple(ids[between]),
            after=tuple(ids[second[-1] + 1 :]),
            num_first=segments[between].count(0) if has_segments else None,
        )

    @property
    def num(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)
