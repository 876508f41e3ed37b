"""What all the machines share that read calls: plain text, markers, and the parts that come out."""

import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from penstock.server.output.json_scanner import WHITESPACE
from penstock.server.output.parts import CallArguments, CallStart, Part, TextPart, merged

# No model writes so much between the marker and the arguments; longer is no call.
MAX_NAME_CHARS = 256
# The first characters of all markers, and the end of a line, behind which JSON may begin.
_MAY_BEGIN_MARKUP = re.compile(r"[<\[{\n]")


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ToolParser:
    """What all the machines share. A state is a method that takes one character.

    names: the functions that there are. Markup that a text may well have by chance (bare JSON, a
    list in brackets) counts as a call only of one of these. schemas: of their arguments, for the
    formats that write values without quotes, so that only the schema tells 5 from "5". max_calls:
    `is_over` turns true when so many are complete, and nothing more is taken.
    """

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
        self._space = ""  # whitespace that falls away should a call follow
        self._is_behind_call = False

    def feed(self, text: str) -> list[Part]:
        position = 0
        while position < len(text) and not self.is_over:
            if plain := self._plain_run(text, position):
                self._say(plain)
                self._pass_over(plain)
                position += len(plain)
            else:
                self._state(text[position])
                position += 1
        return self._take()

    def _plain_run(self, text: str, start: int) -> str:
        """From there on, what cannot begin any markup: most of all text, and said at once."""
        if self._held or self._state != self._in_text:
            return ""
        found = _MAY_BEGIN_MARKUP.search(text, start)
        return text[start : found.start() if found else len(text)]

    def _pass_over(self, plain: str) -> None:
        """What a parser has to remember of a line that it has not seen character by character."""

    def end(self) -> list[Part]:
        """No more text comes: what was held back is plain."""
        if not self.is_over:
            self._say(self._release())
            if self._space:
                self._parts.append(TextPart(self._space))
                self._space = ""
        return self._take()

    def _in_text(self, char: str) -> None:
        raise NotImplementedError

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return merged(parts)

    def _release(self) -> str:
        held, self._held = self._held, ""
        return held

    def _say(self, text: str) -> None:
        """Plain text, but for whitespace at its end, which waits to see what comes."""
        if self._is_behind_call:
            text = text.lstrip(WHITESPACE)
            if not text:
                return
            self._is_behind_call = False
        text = self._space + text
        said = text.rstrip(WHITESPACE)
        self._space = text[len(said) :]
        if said:
            self._parts.append(TextPart(said))

    def _replay(self, text: str) -> None:
        """It was no markup of a call: back to plain text, from here."""
        self._state = self._in_text
        for char in text:
            self._state(char)

    def _give_up(self, char: str) -> None:
        """What is held is plain; this character may be anything."""
        self._say(self._release())
        self._replay(char)

    def _match(self, char: str, markers: tuple[str, ...]) -> str | None:
        """In plain text: the marker that is complete now, taken out. Else text that is certain."""
        self._held += char
        if self._held in markers:
            return self._release()
        while self._held and not any(marker.startswith(self._held) for marker in markers):
            first, self._held = self._held[0], self._held[1:]
            self._say(first)
        return None

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """call_id: the model's own, where its format has them."""
        self._held = self._space = ""
        self._is_behind_call = False
        self._parts.append(CallStart(self.num_calls, call_id or self._make_id(), name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        self._parts.append(CallArguments(self.num_calls - 1, text))

    def _end_call(self, then: Callable[[str], None]) -> None:
        self._held = ""
        self._is_behind_call = True
        self._state = then
        self._num_done += 1
        self.is_over = self._num_done == self._max_calls
