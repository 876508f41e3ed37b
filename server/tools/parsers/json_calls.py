"""The formats in which a call is a JSON object: after a marker, in a list, or bare."""

from typing import Any

from penstock.server.output.json_scanner import WHITESPACE
from penstock.server.tools.parsers.base import ToolParser
from penstock.server.tools.parsers.call_object import CallObject, Status


class ObjectCalls(ToolParser):
    """Reads a sequence of objects. A subclass defines what may precede and follow them."""

    # Whether an object is a call even of an unknown function, since a marker precedes it.
    _takes_any_name = True

    def _before_object(self, char: str) -> None:
        if char in WHITESPACE:
            self._held += char
        elif char == "{":
            self._begin_object(char)
        else:
            self._reject(char)

    def _begin_object(self, char: str) -> None:
        self._call = CallObject(self, None if self._takes_any_name else self._names)
        self._state = self._in_object
        self._in_object(char)

    def _in_object(self, char: str) -> None:
        match self._call.feed(char):
            case Status.DONE:
                self._end_object()
            case Status.BROKEN:
                self._reject(char)
            case _ if not self._call.has_started:
                self._held += char

    def _end_object(self) -> None:
        raise NotImplementedError


class ListCalls(ObjectCalls):
    """Reads lists of objects too."""

    def _begin_list(self, char: str) -> None:
        self._held += char
        self._state = self._before_object

    def _after_item(self, char: str) -> None:
        self._held += char
        if char == ",":
            self._state = self._before_object
        elif char == "]":
            self._end_list()
        elif char not in WHITESPACE:
            self._replay(self._take_held())

    def _end_list(self) -> None:
        self._held = ""
        self._state = self._in_text


class HermesParser(ObjectCalls):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

    _BEGIN, _END = "<tool_call>", "</tool_call>"

    def _in_text(self, char: str) -> None:
        if self._match(char, (self._BEGIN,)):
            self._held = self._BEGIN
            self._state = self._before_object

    def _end_object(self) -> None:
        self._end_call(self._after_object)

    def _after_object(self, char: str) -> None:
        """The end marker, which some models forget."""
        self._held += char
        prefix = self._held.lstrip(WHITESPACE)
        if prefix == self._END:
            self._held = ""
            self._state = self._in_text
        elif not self._END.startswith(prefix):
            self._replay(self._take_held())


class JsonParser(ListCalls):
    """Bare JSON at the beginning of a line: one call, or a list of them. Any model can write it."""

    _takes_any_name = False
    _MARKERS: tuple[str, ...] = ()
    # Markers that may follow the calls and are ignored.
    _ENDS: tuple[str, ...] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_line_start = True
        self._is_list = False

    def _in_text(self, char: str) -> None:
        if char in "{[" and self._is_line_start and not self._held:
            self._begin(char)
            return
        self._is_line_start = char == "\n" or (self._is_line_start and char in WHITESPACE)
        marker = self._match(char, self._MARKERS + self._ENDS * bool(self.num_calls))
        if marker in self._MARKERS:
            self._held = marker or ""
            self._state = self._after_marker

    def _begin(self, char: str) -> None:
        self._is_list = char == "["
        if self._is_list:
            self._begin_list(char)
        else:
            self._begin_object(char)

    def _after_marker(self, char: str) -> None:
        if char in WHITESPACE:
            self._held += char
        elif char in "{[":
            self._begin(char)
        else:
            self._reject(char)

    def _on_plain_run(self, plain: str) -> None:
        if plain.strip(WHITESPACE):
            self._is_line_start = False

    def _reject(self, char: str) -> None:
        self._is_line_start = self._held.rstrip(" \t").endswith("\n")
        super()._reject(char)

    def _end_object(self) -> None:
        self._end_call(self._after_item if self._is_list else self._after_call)

    def _after_item(self, char: str) -> None:
        if char not in "],":
            self._is_line_start = self._is_line_start and char in WHITESPACE
        super()._after_item(char)

    def _end_list(self) -> None:
        self._held = ""
        self._state = self._after_call

    def _after_call(self, char: str) -> None:
        """Llama separates calls with a semicolon, other models with a comma or a line break."""
        if char in "{[":
            self._begin(char)
        elif char in WHITESPACE or (char in ";," and not self._held.strip(WHITESPACE)):
            self._held += char
        else:
            self._is_line_start = "\n" in self._held
            self._emit_text(self._take_held())
            self._replay(char)


class Llama3JsonParser(JsonParser):
    """`{"name": ..., "parameters": {...}}`, often after `<|python_tag|>`: Llama 3.1 and later."""

    _MARKERS = ("<|python_tag|>",)


class MarkedListParser(JsonParser):
    """`<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>`: Granite 3, Phi-4-mini."""

    _MARKERS = ("<|tool_call|>", "<tool_call>")
    _ENDS = ("<|/tool_call|>", "</tool_call>")
