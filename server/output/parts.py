"""The parts of a chat answer: text, reasoning, and calls of the client's tools.

Parts arrive in order and incrementally: consecutive texts of one kind belong together, and so do
the arguments of one call.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple, Protocol


class TextPart(NamedTuple):
    """Text for the user."""

    text: str


class ReasoningPart(NamedTuple):
    """The model's reasoning before it."""

    text: str


class CallStart(NamedTuple):
    """The model calls a function, or a custom tool. index: of the call within this answer."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used
    id: str
    name: str
    is_custom: bool = False


class CallArguments(NamedTuple):
    """More of a call's arguments; all of them joined are a JSON object, or a custom tool's input,
    which may be any text."""

    index: int  # type: ignore[assignment]
    text: str
    is_custom: bool = False


Part = TextPart | ReasoningPart | CallStart | CallArguments


class AnswerReader(Protocol):
    """Divides the text of one answer into parts, incrementally."""

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far ends within the reasoning."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the answer must end here, since all calls that are allowed are complete."""
        ...

    @property
    def has_calls(self) -> bool: ...

    def feed(self, text: str) -> list[Part]: ...

    def end(self) -> list[Part]:
        """The answer has ended: the parts that were held back."""
        ...


def merged(parts: Iterable[Part]) -> list[Part]:
    """The same parts, with those joined that belong together."""
    result: list[Part] = []
    for _, (first, *others) in groupby(parts, _kind):
        if others and not isinstance(first, CallStart):
            texts = [part.text for part in others if not isinstance(part, CallStart)]
            first = first._replace(text="".join([first.text, *texts]))
        result.append(first)
    return result


def num_begun(text: str, marker: str) -> int:
    """How many characters at the end of the text may be the beginning of the marker."""
    if marker[0] not in text:
        return 0
    for num in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-num:]):
            return num
    return 0


def _kind(part: Part) -> tuple[type[Part], int]:
    return type(part), part.index if isinstance(part, CallStart | CallArguments) else 0
