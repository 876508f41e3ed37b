"""`<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`: Gemma 4.

The arguments are JSON but for keys without quotes, and strings between special tokens in place of
quotes and escapes. They stream as JSON.
"""

import json
import re
from typing import Any

from penstock.server.output.json_scanner import WHITESPACE
from penstock.server.output.parts import num_begun
from penstock.server.tools.parsers.base import MAX_NAME_CHARS, escaped
from penstock.server.tools.parsers.header_calls import HeaderCalls

QUOTE = '<|"|>'
_CLOSING = {"{": "}", "[": "]"}
# As its template writes them, and as models trained on Python do.
_LITERALS = {"None": "null", "True": "true", "False": "false"}


class GemmaParser(HeaderCalls):
    """See above."""

    _BEGINS, _ENDS, _INNER = ("<|tool_call>",), ("<tool_call|>",), (QUOTE,)
    _HEADER = re.compile(r"\s*call:\s*(?P<name>[\w.-]+)\s*")

    def _begin_arguments(self) -> None:
        self._arguments = _Arguments()

    def _in_arguments(self, char: str) -> None:
        self._held += char
        found = self._arguments.feed(char)
        if found is None:
            self.add_arguments(self._arguments.rest())
            self._replay_held()
            return
        if found:
            self.add_arguments(found)
            self._held = ""
        if self._arguments.is_done:
            self._end_call(self._in_text)


class _Arguments:
    """One object, translated to JSON character by character."""

    def __init__(self) -> None:
        self._open: list[str] = []  # the brackets
        self._is_first = True  # nothing is in the innermost one
        self._is_string = False
        self._is_value = True  # in place of a key
        self._is_over = False  # a value, whose comma or bracket comes next
        self._held = ""  # a key, a literal, or the beginning of a marker

    @property
    def is_done(self) -> bool:
        return self._is_over and not self._open

    def feed(self, char: str) -> str | None:
        """JSON that is certain now; None for what belongs to no object."""
        if self._is_string:
            return self._in_string(char)
        if self._is_over:
            return self._after_value(char)
        if not self._held and char in WHITESPACE:
            return ""
        if self._held.startswith(QUOTE):
            return self._in_quoted_key(char)
        if self._is_value:
            return self._in_value(char)
        return self._in_key(char)

    def rest(self) -> str:
        """Returns the text that completes the JSON returned before."""
        begun = '"' if self._is_string else ""
        if not begun and self._is_value and not self._is_over and self._in_object:
            begun = "null"
        return begun + "".join(_CLOSING[each] for each in reversed(self._open))

    @property
    def _in_object(self) -> bool:
        return bool(self._open) and self._open[-1] == "{"

    def _in_value(self, char: str) -> str | None:
        if not self._held and char in _CLOSING:
            begin = self._begin() + char
            self._open.append(char)
            self._is_first, self._is_value = True, char == "["
            return begin
        if not self._held and char == "]" and not self._in_object and self._is_first:
            return self._close()
        if not self._open:
            return None
        if char in ",]}":
            literal = _as_json(self._held.rstrip(WHITESPACE))
            if literal is None or char not in ("," + _CLOSING[self._open[-1]]):
                return None
            begin, self._held, self._is_over = self._begin(), "", True
            return begin + literal + (self._after_value(char) or "")
        self._held += char
        if self._held == QUOTE:
            self._held, self._is_string = "", True
            return self._begin() + '"'
        return ""

    def _begin(self) -> str:
        """Returns the comma before a value, if it needs one."""
        comma = "" if self._is_first or self._in_object else ", "
        self._is_first = False
        return comma

    def _in_key(self, char: str) -> str | None:
        if char == "}" and not self._held and self._is_first:
            return self._close()
        if char == ":" and self._held:
            return self._key(self._held.strip(WHITESPACE + "\"'"))
        if char in ",{}[]" or len(self._held) == MAX_NAME_CHARS:
            return None
        self._held += char
        return ""

    def _in_quoted_key(self, char: str) -> str | None:
        self._held += char
        name, closing, after = self._held.removeprefix(QUOTE).partition(QUOTE)
        if closing and after.endswith(":"):
            return self._key(name) if after == ":" else None
        if after.strip(WHITESPACE) or len(name) > MAX_NAME_CHARS:
            return None
        return ""

    def _key(self, name: str) -> str:
        comma = "" if self._is_first else ", "
        self._held, self._is_first, self._is_value = "", False, True
        return f"{comma}{json.dumps(name, ensure_ascii=False)}: "

    def _in_string(self, char: str) -> str:
        self._held += char
        if self._held.endswith(QUOTE):
            text, self._held = self._held.removesuffix(QUOTE), ""
            self._is_string, self._is_over = False, True
            return escaped(text) + '"'
        certain = len(self._held) - num_begun(self._held, QUOTE)
        text, self._held = self._held[:certain], self._held[certain:]
        return escaped(text)

    def _after_value(self, char: str) -> str | None:
        if char in WHITESPACE:
            return ""
        if char == ",":
            self._is_over, self._is_value = False, not self._in_object
            return ""
        if char == _CLOSING[self._open[-1]]:
            return self._close()
        return None

    def _close(self) -> str:
        self._is_over, self._is_first = True, False
        return _CLOSING[self._open.pop()]


def _as_json(text: str) -> str | None:
    """A literal: a number, true, false, null; else a string, which lacks its quotes."""
    if not text:
        return None
    if text in _LITERALS:
        return _LITERALS[text]
    try:
        value: Any = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        value = text
    return json.dumps(value, ensure_ascii=False)
