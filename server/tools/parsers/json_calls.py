"""The formats in which a call is a JSON object: after a marker, in a list, or bare."""

import json
from collections.abc import Callable
from enum import Enum, auto

from penstock.server.output.json_scanner import WHITESPACE, Expect, JsonScanner
from penstock.server.output.parts import CallArguments, CallStart, Part
from penstock.server.tools.parsers.base import LineParser, ToolParser, new_call_id


class Status(Enum):
    MORE = auto()
    DONE = auto()
    BROKEN = auto()


class CallObject:
    """Reads one `{"name": ..., "arguments": {...}}`, with its keys in any order.

    Starts the call at the parser as soon as the name is known and the arguments begin. The key may
    also be "parameters", and the arguments a string that contains JSON.
    """

    _ARGUMENTS = ("arguments", "parameters")
    _STRINGS = ("name", "type", "id")

    def __init__(self, parser: ToolParser, names: frozenset[str] | None) -> None:
        """names: of the functions; None accepts any name."""
        self.has_started = False
        self._parser = parser
        self._names = names
        self._scanner = JsonScanner()
        self._key = ""
        self._raw = ""  # the key or value at depth 1 that is being read
        self._seen: set[str] = set()
        self._name: str | None = None
        self._arguments: str | None = None  # if they precede the name

    def feed(self, char: str) -> Status:
        scanner = self._scanner
        depth, expected = scanner.depth, scanner.expects
        if not scanner.feed(char):
            return Status.BROKEN
        if scanner.is_done:
            return Status.DONE if self._finish() else Status.BROKEN
        if depth == 0 or (depth == 1 and char in WHITESPACE and not self._raw):
            return Status.MORE
        if depth == 1 and expected in (Expect.COLON, Expect.COMMA_OR_END):
            return Status.MORE
        if not self._raw and expected is Expect.VALUE and not self._may_begin(char):
            return Status.BROKEN
        self._raw += char
        if self.has_started and self._key in self._ARGUMENTS:
            self._parser.add_arguments(char)
            self._raw = "{"  # only marks that the value has begun
        if scanner.depth == 1 and not self._end_item(scanner.expects):
            return Status.BROKEN
        return Status.MORE

    def _may_begin(self, char: str) -> bool:
        """Whether a value at depth 1 may begin with this character."""
        if self._key in self._STRINGS:
            return char == '"'
        if char == "{" and self._name is not None:
            self._start()
        return char in '{"n'

    def _end_item(self, expects: Expect) -> bool:
        """False if a key or a value that ends here does not belong in a call."""
        if expects is Expect.COLON:
            self._key, self._raw = json.loads(self._raw), ""
            is_new = self._kind not in self._seen
            self._seen.add(self._kind)
            return is_new and self._key in (*self._ARGUMENTS, *self._STRINGS)
        if expects is not Expect.COMMA_OR_END:
            return True
        raw, self._raw = self._raw, ""
        kind, self._key = self._kind, ""
        if kind == "name":
            self._name = name = json.loads(raw)
            is_name = bool(name) and name.isprintable()  # false for lone surrogates
            return is_name and (self._names is None or name in self._names)
        if kind == "arguments" and not self.has_started:
            self._arguments = _arguments_of(raw)
            return self._arguments is not None
        return True

    @property
    def _kind(self) -> str:
        return "arguments" if self._key in self._ARGUMENTS else self._key

    def _start(self) -> None:
        assert self._name is not None
        self.has_started = True
        self._parser.start_call(self._name)

    def _finish(self) -> bool:
        if self._name is None:
            return False
        if not self.has_started:
            self._start()
            self._parser.add_arguments(self._arguments or "{}")
        return True


def _arguments_of(raw: str) -> str | None:
    """The arguments as a JSON object, given as an object, a string of JSON, or null; else None."""
    if raw == "null":
        return "{}"
    if raw[0] == '"':
        raw = json.loads(raw).strip(WHITESPACE)
        scanner = JsonScanner()
        is_json = all(not scanner.is_done and scanner.feed(char) for char in raw)
        return raw if is_json and scanner.is_done and raw[0] == "{" and is_text(raw) else None
    return raw


def is_text(text: str) -> bool:
    """Whether it has no lone surrogates, which JSON can express and clients cannot read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
            self._replay_held()

    def _end_list(self) -> None:
        self._end_markup()


class HermesParser(ObjectCalls):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

    _BEGINS, _INNER = ("<tool_call>",), ("</tool_call>",)

    def _after_marker(self, char: str) -> None:
        self._before_object(char)

    def _end_object(self) -> None:
        self._end_call(self._after_object)

    def _after_object(self, char: str) -> None:
        """The end marker, which some models forget."""
        self._find_next(char, dict.fromkeys(self._INNER, self._end_markup), self._replay_held)


class JsonParser(ListCalls, LineParser):
    """Bare JSON at the beginning of a line: one call, or a list of them. Any model can write it."""

    _takes_any_name = False
    _OPENERS = "{["
    _is_list = False

    def _begin(self, char: str) -> None:
        self._is_list = char == "["
        if self._is_list:
            self._begin_list(char)
        else:
            self._begin_object(char)

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

    _BEGINS = ("<|python_tag|>",)


class MarkedListParser(JsonParser):
    """`<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>`: Granite 3, Phi-4-mini."""

    _BEGINS = ("<|tool_call|>", "<tool_call>")
    _ENDS = ("<|/tool_call|>", "</tool_call>")


class NamedCallParser:
    """Reads the whole answer as the arguments of one call, which a grammar has enforced. is_custom:
    they are the input of a custom tool."""

    def __init__(
        self, name: str, make_id: Callable[[], str] = new_call_id, *, is_custom: bool = False
    ) -> None:
        self.num_calls = 0
        self.is_over = False
        self._name = name
        self._make_id = make_id
        self._is_custom = is_custom

    def feed(self, text: str) -> list[Part]:
        if not text:
            return []
        parts: list[Part] = [CallArguments(0, text, self._is_custom)]
        if not self.num_calls:
            self.num_calls = 1
            parts.insert(0, CallStart(0, self._make_id(), self._name, self._is_custom))
        return parts

    def end(self) -> list[Part]:
        return []
