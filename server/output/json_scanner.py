"""Finds the end of a JSON value character by character, while the value is generated."""

import re
from enum import Enum, auto

WHITESPACE = " \t\r\n"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LITERALS = {"t": "true", "f": "false", "n": "null"}


class Expect(Enum):
    """The next character that is allowed, apart from whitespace where it is allowed."""

    VALUE = auto()
    VALUE_OR_END = auto()  # after [
    KEY = auto()  # after a comma in an object
    KEY_OR_END = auto()  # after {
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    LITERAL = auto()
    NUMBER = auto()
    NOTHING = auto()  # the value is complete


class JsonScanner:
    """A pushdown automaton for one object or array, exactly as strict as RFC 8259. depth: of
    nesting. It does not recurse, so no nesting is too deep."""

    def __init__(self) -> None:
        self.expects = Expect.VALUE
        self._open: list[str] = []
        self._is_key = False
        self._rest = ""  # the rest of a literal, or the number so far
        self._num_hex = 0

    @property
    def depth(self) -> int:
        return len(self._open)

    @property
    def is_done(self) -> bool:
        return self.expects is Expect.NOTHING

    def feed(self, char: str) -> bool:
        """Whether the text so far can become, or is, a JSON object or array."""
        match self.expects:
            case Expect.STRING:
                return self._in_string(char)
            case Expect.ESCAPE:
                return self._in_escape(char)
            case Expect.HEX:
                return self._in_hex(char)
            case Expect.LITERAL:
                return self._in_literal(char)
            case Expect.NUMBER:
                return self._in_number(char)
        if char in WHITESPACE:
            return True
        match self.expects:
            case Expect.VALUE:
                return self._value(char)
            case Expect.VALUE_OR_END:
                return self._close("[") if char == "]" else self._value(char)
            case Expect.KEY_OR_END if char == "}":
                return self._close("{")
            case Expect.KEY | Expect.KEY_OR_END:
                return char == '"' and self._string(is_key=True)
            case Expect.COLON:
                self.expects = Expect.VALUE
                return char == ":"
            case Expect.COMMA_OR_END:
                return self._after_value(char)
        return False

    def _value(self, char: str) -> bool:
        if char in "{[":
            self._open.append(char)
            self.expects = Expect.KEY_OR_END if char == "{" else Expect.VALUE_OR_END
            return True
        if not self._open:
            return False
        if char == '"':
            return self._string(is_key=False)
        if char in _LITERALS:
            self.expects, self._rest = Expect.LITERAL, _LITERALS[char][1:]
            return True
        self.expects, self._rest = Expect.NUMBER, char
        return char in "-0123456789"

    def _string(self, *, is_key: bool) -> bool:
        self.expects, self._is_key = Expect.STRING, is_key
        return True

    def _in_string(self, char: str) -> bool:
        if char == '"':
            self.expects = Expect.COLON if self._is_key else Expect.COMMA_OR_END
        elif char == "\\":
            self.expects = Expect.ESCAPE
        return char >= " "

    def _in_escape(self, char: str) -> bool:
        self.expects = Expect.HEX if char == "u" else Expect.STRING
        self._num_hex = 0
        return char in '"\\/bfnrtu'

    def _in_hex(self, char: str) -> bool:
        self._num_hex += 1
        if self._num_hex == 4:
            self.expects = Expect.STRING
        return char in "0123456789abcdefABCDEF"

    def _in_literal(self, char: str) -> bool:
        expected, self._rest = self._rest[0], self._rest[1:]
        if not self._rest:
            self.expects = Expect.COMMA_OR_END
        return char == expected

    def _in_number(self, char: str) -> bool:
        if char in "0123456789.eE+-":
            self._rest += char
            return True
        self.expects = Expect.COMMA_OR_END
        is_number = _NUMBER.fullmatch(self._rest) is not None
        return is_number and (char in WHITESPACE or self._after_value(char))

    def _after_value(self, char: str) -> bool:
        if char == ",":
            self.expects = Expect.KEY if self._open[-1] == "{" else Expect.VALUE
            return True
        return self._close({"}": "{", "]": "["}.get(char, ""))

    def _close(self, opener: str) -> bool:
        if self._open[-1] != opener:
            return False
        self._open.pop()
        self.expects = Expect.COMMA_OR_END if self._open else Expect.NOTHING
        return True
