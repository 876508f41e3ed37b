"""The formats that resemble XML: a name, and each argument between tags.

Values are written without quotes, so the function's schema gives their types. Strings stream; other
values are emitted once they are complete.
"""

import json
import re

from penstock.server.output.json_scanner import WHITESPACE
from penstock.server.tools.parsers.base import MAX_NAME_CHARS, ToolParser, escaped
from penstock.server.tools.parsers.schema_values import as_json, properties_of, types_of

_NAME = re.compile(r"[\w.-]+")


class TaggedParser(ToolParser):
    """The state machine of all of them; a subclass defines the tags.

    A call is _NAME_OPENING, its name, _NAME_CLOSING, its arguments, _CALL_CLOSING; an argument is
    _KEY_OPENING, its name, _KEY_CLOSING, _VALUE_OPENING, the value, _VALUE_CLOSING. Whitespace may
    stand between any two of them. Calls follow one of _BEGINS, and _ENDS may close them.
    """

    _NAME_OPENING: str
    _NAME_CLOSING: str
    _KEY_OPENING: str
    _KEY_CLOSING: str
    _VALUE_OPENING = ""
    _VALUE_CLOSING: str
    _CALL_CLOSING: str
    # Whether a value has lines of its own, whose line breaks do not belong to it.
    _has_lines = False

    def _in_text(self, char: str) -> None:
        if marker := self._begin_marker(char):
            self._written = ""
            self._state = self._in_name if marker == self._NAME_OPENING else self._before_name

    def _before_name(self, char: str) -> None:
        self._find_next(char, {self._NAME_OPENING: self._begin_name}, self._reject_last)

    def _begin_name(self) -> None:
        self._written = ""
        self._state = self._in_name

    def _in_name(self, char: str) -> None:
        self._hold(char)
        if self._written.endswith(self._NAME_CLOSING):
            self._start(self._written.removesuffix(self._NAME_CLOSING), rest="")
        elif not self._NAME_OPENING and (char in WHITESPACE or char == "<"):
            self._start(self._written[:-1], rest=char)
        elif len(self._written) > MAX_NAME_CHARS:
            self._reject_last()

    def _start(self, name: str, *, rest: str) -> None:
        """rest: characters after the name that have been read already."""
        name = name.strip(WHITESPACE + "\"'")
        if not _NAME.fullmatch(name):
            self._reject_last()
            return
        self.start_call(name)
        self._properties = properties_of(self._schemas.get(name, {}))
        self._seen: set[str] = set()
        self._arguments_begin = "{"
        self._to_arguments()
        for char in rest:
            self._state(char)

    def _to_arguments(self) -> None:
        self._held = self._written = ""
        self._state = self._between_arguments

    def _between_arguments(self, char: str) -> None:
        then = {self._CALL_CLOSING: self._close_call, self._KEY_OPENING: self._begin_key}
        self._find_next(char, then, self._end_broken_call)

    def _begin_key(self) -> None:
        self._written = ""
        self._state = self._in_key

    def _in_key(self, char: str) -> None:
        self._hold(char)
        if self._written.endswith(self._KEY_CLOSING):
            key = self._written.removesuffix(self._KEY_CLOSING).strip(WHITESPACE + "\"'")
            if key in self._seen:
                self._end_broken_call()
                return
            self._key = key
            self._seen.add(key)
            self._written = ""
            self._state = self._before_value
            if not self._VALUE_OPENING:
                self._begin_value()
        elif len(self._written) > MAX_NAME_CHARS:
            self._end_broken_call()

    def _before_value(self, char: str) -> None:
        self._find_next(char, {self._VALUE_OPENING: self._begin_value}, self._end_broken_call)

    def _begin_value(self) -> None:
        self._held = self._written = ""
        self._is_fresh = self._has_lines
        self._types = types_of(self._properties.get(self._key))
        self._is_string = self._types == {"string"}
        key = json.dumps(self._key, ensure_ascii=False)
        self.add_arguments(f"{self._arguments_begin}{key}: " + '"' * self._is_string)
        self._arguments_begin = ", "
        self._state = self._in_value

    def _in_value(self, char: str) -> None:
        if self._is_fresh:
            self._is_fresh = False
            if char == "\n":
                return
        self._written += char
        if char == ">" and self._written.endswith(self._VALUE_CLOSING):
            value = self._written.removesuffix(self._VALUE_CLOSING)
            self._end_value(value.removesuffix("\n") if self._has_lines else value)
        elif self._is_string:
            certain = self._certain()
            if certain:
                self.add_arguments(escaped(certain))
                self._written = self._written[len(certain) :]

    def _certain(self) -> str:
        """The value that is written, without a suffix that may belong to the closing tag."""
        start = max(0, len(self._written) - len(self._VALUE_CLOSING))
        for position in range(start, len(self._written)):
            rest = self._written[position:]
            if self._has_lines and rest[0] == "\n":
                rest = rest[1:]
            if self._VALUE_CLOSING.startswith(rest):
                return self._written[:position]
        return self._written

    def _end_value(self, value: str) -> None:
        if self._is_string:
            self.add_arguments(escaped(value) + '"')
        else:
            self.add_arguments(as_json(value, self._types))
        self._to_arguments()

    def _close_call(self) -> None:
        self._close_arguments()
        self._end_call(self._after_call)

    def _after_call(self, char: str) -> None:
        """An end marker, which some models omit, or another call."""
        then = dict.fromkeys(self._ENDS, self._end_markup)
        if self._NAME_OPENING:
            then[self._NAME_OPENING] = self._begin_name
        self._find_next(char, then, self._replay_held)

    def _reject_last(self) -> None:
        """As `_reject`, when the last character is already held."""
        char, self._held = self._held[-1], self._held[:-1]
        self._reject(char)

    def _close_arguments(self) -> None:
        self.add_arguments("{}" if self._arguments_begin == "{" else "}")

    def _end_broken_call(self) -> None:
        """The call has started and is malformed: its arguments end, and the rest is text."""
        self._close_arguments()
        self._replay_held()


class QwenCoderParser(TaggedParser):
    """`<function=name><parameter=key>value</parameter></function>`: Qwen3-Coder, Qwen3.5."""

    _BEGINS = ("<tool_call>", "<function=")
    _ENDS = ("</tool_call>",)
    _NAME_OPENING, _NAME_CLOSING = "<function=", ">"
    _KEY_OPENING, _KEY_CLOSING = "<parameter=", ">"
    _VALUE_CLOSING = "</parameter>"
    _CALL_CLOSING = "</function>"
    _has_lines = True


class SeedOssParser(QwenCoderParser):
    """`<seed:tool_call><function=name><parameter=key>value</parameter></function>`: Seed-OSS."""

    _BEGINS = ("<seed:tool_call>", "<function=")
    _ENDS = ("</seed:tool_call>",)
    _has_lines = False


class GlmParser(TaggedParser):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM-4.5."""

    _BEGINS = ("<tool_call>",)
    _NAME_OPENING, _NAME_CLOSING = "", "\n"
    _KEY_OPENING, _KEY_CLOSING = "<arg_key>", "</arg_key>"
    _VALUE_OPENING, _VALUE_CLOSING = "<arg_value>", "</arg_value>"
    _INNER = (_KEY_OPENING, _KEY_CLOSING, _VALUE_OPENING, _VALUE_CLOSING)
    _CALL_CLOSING = "</tool_call>"

    def _before_name(self, char: str) -> None:
        self._held += char
        if char not in WHITESPACE:
            self._state, self._written = self._in_name, char


class MinimaxParser(TaggedParser):
    """`<invoke name="f"><parameter name="key">value</parameter></invoke>`: MiniMax-M2."""

    _BEGINS = ("<minimax:tool_call>",)
    _ENDS = ("</minimax:tool_call>",)
    _NAME_OPENING, _NAME_CLOSING = '<invoke name="', '">'
    _KEY_OPENING, _KEY_CLOSING = '<parameter name="', '">'
    _VALUE_CLOSING = "</parameter>"
    _CALL_CLOSING = "</invoke>"
