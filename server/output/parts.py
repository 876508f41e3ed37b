"""What a chat answer consists of besides its text: reasoning, and calls of the client's functions.

An answer's parts come in order and in pieces: texts of one kind that follow each other belong
together, and so do the arguments of one call.
"""

from collections.abc import Iterable
from typing import NamedTuple


class TextPart(NamedTuple):
    """What the user is to read."""

    text: str


class ReasoningPart(NamedTuple):
    """What the model thought before it."""

    text: str


class CallStart(NamedTuple):
    """The client is asked to call a function. index counts the calls of this answer."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody asks of it
    id: str
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments: all of them joined are a JSON object."""

    index: int  # type: ignore[assignment]
    text: str


Part = TextPart | ReasoningPart | CallStart | CallArguments


def merged(parts: Iterable[Part]) -> list[Part]:
    """The same with neighbours joined that belong together."""
    runs: list[tuple[Part, list[str]]] = []
    for part in parts:
        text = [] if isinstance(part, CallStart) else [part.text]
        if text and runs and _continues(runs[-1][0], part):
            runs[-1][1].extend(text)
        else:
            runs.append((part, text))
    return [_with_text(part, "".join(texts)) for part, texts in runs]


def _continues(last: Part, part: Part) -> bool:
    if isinstance(last, CallArguments) and isinstance(part, CallArguments):
        return last.index == part.index
    return type(last) is type(part)


def _with_text(part: Part, text: str) -> Part:
    if isinstance(part, CallStart):
        return part
    return part._replace(text=text)
