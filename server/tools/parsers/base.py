"""The base of all parsers of calls: plain text, markers, and the parts that they emit."""

import json
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from penstock.server.output.json_scanner import WHITESPACE
from penstock.server.output.parts import CallArguments, CallStart, Part, TextPart, merged

# No model writes this much between the marker and the arguments; longer text is not a call.
MAX_NAME_CHARS = 256
# Whitespace between the markers of a call; a model that writes more of it writes text.
MAX_BETWEEN = 256
# The first characters of all markers, and the line break, after which JSON may begin.
_MAY_BEGIN_MARKUP = re.compile(r"[<\[{\n]")


def escaped(text: str) -> str:
    """As it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ToolParser:
    """The base of all state machines. A state is a method that takes one character.

    names: of the functions. Markup that plain text may contain by chance (bare JSON, a list in
    brackets) counts as a call only if it names one of them. schemas: of their arguments, for
    formats that write values without quotes, where only the schema distinguishes 5 from "5".
    max_calls: once this many are complete, `is_over` is true and further text is ignored.

    _BEGINS: markers of which one precedes calls. _ENDS: those that are dropped after a call.
    _INNER: those within calls that may be special tokens too.
    """

    _BEGINS: tuple[str, ...] = ()
    _ENDS: tuple[str, ...] = ()
    _INNER: tuple[str, ...] = ()

    def __init__(
        self,
        names: frozenset[str],
        *,
        schemas: Mapping[str, dict[str, Any]] | None = None,
        max_calls: int | None = None,
        make_id: Callable[[], str] = new_call_id,
    ) -> None:
        self.num_calls = 0
        self.is_over = False
        self._names = names
        self._schemas = schemas or {}
        self._max_calls = max_calls
        self._num_done = 0
        self._make_id = make_id
        self._state: Callable[[str], None] = self._in_text
        self._parts: list[Part] = []
        self._held = ""  # what may be markup
        self._written = ""  # the end of it that `_find_next` looks at
        self._space: list[str] = []  # whitespace that is dropped if a call follows
        self._is_after_call = False

    @classmethod
    def markup(cls) -> tuple[str, ...]:
        """Markup that the parser must see even where it consists of special tokens."""
        return cls._BEGINS + cls._ENDS + cls._INNER

    def feed(self, text: str) -> list[Part]:
        position = 0
        while position < len(text) and not self.is_over:
            if plain := self._plain_run(text, position):
                self._emit_text(plain)
                self._on_plain_run(plain)
                position += len(plain)
            else:
                self._state(text[position])
                position += 1
        return self._take()

    def _plain_run(self, text: str, start: int) -> str:
        """The text from `start` up to possible markup; most text passes this way, at once."""
        if self._held or self._state != self._in_text:
            return ""
        found = _MAY_BEGIN_MARKUP.search(text, start)
        return text[start : found.start() if found else len(text)]

    def _on_plain_run(self, plain: str) -> None:
        """Text that did not pass character by character, for `LineParser`."""

    def end(self) -> list[Part]:
        """The answer has ended: text held back is plain."""
        if not self.is_over:
            self._emit_text(self._take_held())
            if space := "".join(self._space):
                self._parts.append(TextPart(space))
            self._space = []
        return self._take()

    def _in_text(self, char: str) -> None:
        if self._begin_marker(char):
            self._state = self._after_marker

    def _begin_marker(self, char: str) -> str | None:
        """The marker before calls that `char` completes, if any; it is held."""
        marker = self._match(char, self._BEGINS + self._ENDS * bool(self.num_calls))
        if marker not in self._BEGINS:
            return None
        self._held = marker or ""
        return marker

    def _after_marker(self, char: str) -> None:
        raise NotImplementedError

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return merged(parts)

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held

    def _emit_text(self, text: str) -> None:
        """Emits plain text, except for whitespace at its end, which waits for what follows."""
        if self._is_after_call:
            text = text.lstrip(WHITESPACE)
            if not text:
                return
            self._is_after_call = False
        stripped = text.rstrip(WHITESPACE)
        if stripped:
            self._parts.append(TextPart("".join((*self._space, stripped))))
            self._space = []
        self._space.append(text[len(stripped) :])

    def _hold(self, char: str) -> None:
        self._held += char
        self._written += char

    def _find_next(
        self, char: str, then: Mapping[str, Callable[[], None]], otherwise: Callable[[], None]
    ) -> None:
        """One of these markers comes next, perhaps after some whitespace: calls what belongs to the
        one that `char` completes, or `otherwise` where there is none."""
        self._hold(char)
        prefix = self._written.lstrip(WHITESPACE)
        if prefix in then:
            then[prefix]()
        elif len(self._written) > MAX_BETWEEN or not any(m.startswith(prefix) for m in then):
            otherwise()

    def _end_markup(self) -> None:
        """The held text was markup, and plain text follows."""
        self._held = ""
        self._state = self._in_text

    def _replay_held(self) -> None:
        self._replay(self._take_held())

    def _replay(self, text: str) -> None:
        """The text was not markup: reads it again from the state of plain text."""
        self._state = self._in_text
        for char in text:
            self._state(char)

    def _reject(self, char: str) -> None:
        """The held text is not markup but plain; `char` may still begin markup."""
        self._emit_text(self._take_held())
        self._replay(char)

    def _match(self, char: str, markers: tuple[str, ...]) -> str | None:
        """The marker that `char` completes, if any; emits text that cannot belong to a marker."""
        self._held += char
        if self._held in markers:
            return self._take_held()
        while self._held and not any(marker.startswith(self._held) for marker in markers):
            first, self._held = self._held[0], self._held[1:]
            self._emit_text(first)
        return None

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """call_id: the one that the model wrote, in formats that have them."""
        self._held, self._space = "", []
        self._is_after_call = False
        self._parts.append(CallStart(self.num_calls, call_id or self._make_id(), name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        self._parts.append(CallArguments(self.num_calls - 1, text))

    def _end_call(self, then: Callable[[str], None]) -> None:
        self._held = self._written = ""
        self._is_after_call = True
        self._state = then
        self._num_done += 1
        self.is_over = self._num_done == self._max_calls


class LineParser(ToolParser):
    """The base of those whose calls may also begin a line, with one of _OPENERS."""

    _OPENERS: str
    _is_line_start = True

    def _begin(self, char: str) -> None:
        raise NotImplementedError

    def _in_text(self, char: str) -> None:
        if char in self._OPENERS and self._is_line_start and not self._held:
            self._begin(char)
            return
        self._is_line_start = char == "\n" or (self._is_line_start and char in WHITESPACE)
        super()._in_text(char)

    def _after_marker(self, char: str) -> None:
        if char in WHITESPACE:
            self._held += char
        elif char in self._OPENERS:
            self._begin(char)
        else:
            self._reject(char)

    def _on_plain_run(self, plain: str) -> None:
        if plain.strip(WHITESPACE):
            self._is_line_start = False

    def _reject(self, char: str) -> None:
        self._is_line_start = self._held.rstrip(" \t").endswith("\n")
        super()._reject(char)
