"""Text that a model writes for ever, at any place of a call: it takes time in proportion to it."""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import pytest

from penstock.server.output.parts import Part
from penstock.server.output.reasoning import ReasoningFormat, ReasoningState, make_splitter
from penstock.server.tools.parsers.base import ToolParser
from tests.server.tools import test_formats, test_parsers

EXAMPLES = dict(reversed([*test_parsers.EXAMPLES, *test_formats.EXAMPLES]))  # one of each kind
_NUM_CUTS = 5
_UNITS = (" ", "\n", "\t ", "[", "{", '{"a":', '"', "\\", "a", ", ", "<", "</", "<|", "\n{", "(")
_NUM_CHARS = 1_000
# Of four times the text: 16 if it were quadratic. A machine that is busy may slow any one.
_MAX_RATIO, _TRIES, _NEGLIGIBLE_S = 9.0, 5, 0.02


class Reader(Protocol):
    def feed(self, text: str) -> list[Part]: ...
    def end(self) -> list[Part]: ...


def seconds(make: Callable[[], Reader], text: str) -> float:
    reader = make()
    started_s = time.process_time()
    for start in range(0, len(text), 3):  # as tokens come
        reader.feed(text[start : start + 3])
    reader.end()
    return time.process_time() - started_s


def is_quadratic(make: Callable[[], Reader], prefix: str, unit: str) -> bool:
    one, four = (prefix + unit * (n * _NUM_CHARS // len(unit)) for n in (1, 4))
    for _ in range(_TRIES):
        took_s = seconds(make, four)
        if took_s < _NEGLIGIBLE_S or took_s < _MAX_RATIO * seconds(make, one):
            return False
    return True


def slow_texts(make: Callable[[], Reader], text: str, units: Iterable[str]) -> list[str]:
    cuts = sorted({round(len(text) * i / _NUM_CUTS) for i in range(_NUM_CUTS + 1)})
    cases = [(text[:cut], unit) for cut in cuts for unit in units]
    return [
        f"{prefix!r} and then {unit!r}"
        for prefix, unit in cases
        if is_quadratic(make, prefix, unit)
    ]


@pytest.mark.parametrize(
    ("kind", "text"), EXAMPLES.items(), ids=[kind.__name__ for kind in EXAMPLES]
)
def test_calls(kind: type[ToolParser], text: str) -> None:
    make = partial(kind, test_formats.NAMES | test_parsers.NAMES, schemas=test_formats.SCHEMAS)
    halves = [marker[:-1] for marker in kind.markup() if len(marker) > 1]
    assert slow_texts(make, text, [*_UNITS, *kind.markup(), *halves]) == []


@pytest.mark.parametrize("form", list(ReasoningFormat))
def test_reasoning(form: ReasoningFormat) -> None:
    markers = form.markers

    def make() -> Reader:
        splitter = make_splitter(ReasoningState(markers=markers, is_open=False, is_closed=False))
        assert splitter
        return splitter

    text = f"{markers.opening} a thought {markers.closing}{markers.answer}an answer"
    marks = [text for text in markers if text]
    units = [*_UNITS, *marks, *(mark[:-1] for mark in marks), markers.opening + markers.closing]
    assert slow_texts(make, text, units) == []
