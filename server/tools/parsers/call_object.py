"""`{"name": ..., "arguments": {...}}`, the call in most formats, read incrementally."""

import json
from enum import Enum, auto

from penstock.server.output.json_scanner import WHITESPACE, Expect, JsonScanner
from penstock.server.tools.parsers.base import ToolParser


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
        if self._is_streaming:
            self._parser.add_arguments(char)
            self._raw = "{"  # only marks that the value has begun
        if scanner.depth == 1 and not self._end_item(scanner.expects):
            return Status.BROKEN
        return Status.MORE

    @property
    def _is_streaming(self) -> bool:
        return self.has_started and self._key in self._ARGUMENTS

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
