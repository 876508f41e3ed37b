"""The inputs of custom tools in an answer: the model writes `{"input": "..."}`, the client gets the
text."""

import json
from collections.abc import Iterable

from penstock.server.output.json_scanner import Expect, JsonScanner
from penstock.server.output.parts import CallArguments, CallStart, Part
from penstock.server.tools.rules import INPUT


class CustomInputs:
    """Rewrites the parts of one answer, incrementally. names: of the custom tools."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._open: tuple[CallStart, _InputReader] | None = None

    def rewritten(self, parts: Iterable[Part]) -> list[Part]:
        result: list[Part] = []
        for part in parts:
            if self._open and isinstance(part, CallArguments) and part.index == self._open[0].index:
                result += self._input(self._open[1].feed(part.text))
                continue
            result += self.end()
            if isinstance(part, CallStart) and part.name in self._names:
                part = part._replace(is_custom=True)
                self._open = part, _InputReader()
            result.append(part)
        return result

    def end(self) -> list[Part]:
        """Returns what was held back of the call that is open, if one is."""
        if not self._open:
            return []
        parts = self._input(self._open[1].end())
        self._open = None
        return parts

    def _input(self, text: str) -> list[Part]:
        assert self._open
        return [CallArguments(self._open[0].index, text, is_custom=True)] if text else []


class _InputReader:
    """The text in `{"input": "..."}`. Other members are dropped; if there is no such text, the
    arguments are the input as they are, so that nothing of it is lost."""

    def __init__(self) -> None:
        self._scanner = JsonScanner()
        self._arguments: list[str] = []  # until the input begins
        self._key: str | None = None
        self._is_in_key = self._is_in_input = self._has_input = False
        self._escape = ""
        self._surrogate = ""  # the escape of the first half of a character

    def feed(self, text: str) -> str:
        return "".join(map(self._char, text))

    def end(self) -> str:
        if self._has_input:
            return self._lone()
        return "".join(self._arguments)

    def _char(self, char: str) -> str:
        before = self._scanner.expects
        if not self._has_input:
            self._arguments.append(char)
        self._scanner.feed(char)
        after = self._scanner.expects
        if self._is_in_input:
            return self._in_input(char, before, after)
        if self._scanner.depth == 1:
            self._at_top(char, before, after)
        return ""

    def _at_top(self, char: str, before: Expect, after: Expect) -> None:
        if before in (Expect.KEY, Expect.KEY_OR_END) and after is Expect.STRING:
            self._key, self._is_in_key = char, True
        elif self._is_in_key:
            assert self._key is not None
            self._key += char
            if after is Expect.COLON:
                self._key, self._is_in_key = json.loads(self._key), False
        elif before is Expect.VALUE and after is Expect.STRING and self._key == INPUT:
            self._is_in_input = self._has_input = True
            self._arguments.clear()

    def _in_input(self, char: str, before: Expect, after: Expect) -> str:
        if before is Expect.STRING and after is Expect.STRING:
            return self._lone() + char
        self._escape += char
        if after is Expect.STRING:
            escape, self._escape = self._escape, ""
            return self._unescaped(escape)
        if after is Expect.COMMA_OR_END:
            self._is_in_input = False
            return self._lone()
        return ""

    def _unescaped(self, escape: str) -> str:
        """Two escapes make one character beyond the 16 bits of the first."""
        char: str = json.loads(f'"{escape}"')
        if self._surrogate and "\udc00" <= char <= "\udfff":
            first, self._surrogate = self._surrogate, ""
            both: str = json.loads(f'"{first}{escape}"')
            return both
        lone = self._lone()
        if "\ud800" <= char <= "\udbff":
            self._surrogate = escape
            return lone
        return lone + ("\ufffd" if "\udc00" <= char <= "\udfff" else char)

    def _lone(self) -> str:
        """Half a character stands for none: clients could not read it."""
        lone = "\ufffd" * bool(self._surrogate)
        self._surrogate = ""
        return lone
