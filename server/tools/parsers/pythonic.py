"""Calls in Python's notation."""

import ast
import json
import warnings
from typing import Any

from penstock.server.output.json_scanner import WHITESPACE
from penstock.server.tools.parsers.base import MAX_NAME_CHARS, LineParser
from penstock.server.tools.parsers.json_calls import is_text


class PythonicParser(LineParser):
    """`[f(a=1), g(b="x")]` at the beginning of a line: the second format of Llama 3.2 and 4. The
    arguments are Python, so each call is emitted as a whole once it is complete."""

    _BEGINS: tuple[str, ...] = ("<|python_start|>",)
    _ENDS: tuple[str, ...] = ("<|python_end|>",)
    _OPENERS = "["
    _takes_any_name = False
    _call_text = ""
    _depth = 0
    _quote = ""  # of the string that is open
    _is_escaped = False

    def _begin(self, char: str) -> None:
        self._held += char
        self._state = self._before_call

    def _before_call(self, char: str) -> None:
        if char in WHITESPACE:
            self._held += char
        elif char.isalpha() or char == "_":
            self._held += char
            self._call_text = char
            self._state = self._in_name
        else:
            self._reject(char)

    def _in_name(self, char: str) -> None:
        if char == "(" and (self._takes_any_name or self._call_text in self._names):
            self._held += char
            self._depth, self._quote, self._is_escaped = 1, "", False
            self._name = self._call_text
            self._call_text = "f("
            self._state = self._in_call
        elif (char.isalnum() or char in "_.-") and len(self._call_text) < MAX_NAME_CHARS:
            self._held += char
            self._call_text += char
        else:
            self._reject(char)

    def _in_call(self, char: str) -> None:
        self._held += char
        self._call_text += char
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
            if not self._depth:
                self._end_python_call()

    def _end_python_call(self) -> None:
        arguments = _keywords_as_json(self._call_text)
        if arguments is None:
            self._is_line_start = False
            self._reject("")
            return
        self.start_call(self._name)
        self.add_arguments(arguments)
        self._end_call(self._after_python_call)

    def _after_python_call(self, char: str) -> None:
        self._held += char
        if char == ",":
            self._state = self._before_call
        elif char == "]":
            self._end_markup()
        elif char not in WHITESPACE:
            self._is_line_start = False
            self._replay_held()


class Olmo3Parser(PythonicParser):
    """A call a line, between `<function_calls>` and `</function_calls>`: OLMo 3."""

    _CALLS_END = "</function_calls>"
    _BEGINS, _ENDS, _INNER = ("<function_calls>",), (), (_CALLS_END,)
    _takes_any_name = True  # no text is between these markers by chance
    _ending = ""  # the beginning of _CALLS_END
    _has_calls = False  # since the last marker

    def _in_text(self, char: str) -> None:
        if self._begin_marker(char):
            self._ending, self._has_calls = "", False
            self._state = self._before_call

    def _before_call(self, char: str) -> None:
        ending = self._ending + char
        if ending == self._CALLS_END and self._has_calls:
            self._end_markup()
        elif ending != self._CALLS_END and self._CALLS_END.startswith(ending):
            self._held += char
            self._ending = ending
        elif self._ending:
            self._reject(char)
        else:
            super()._before_call(char)

    def _after_python_call(self, char: str) -> None:
        self._has_calls, self._ending = True, ""
        self._state = self._before_call
        self._before_call(char)


_JSON_LITERALS = {"true": True, "false": False, "null": None}


def _keywords_as_json(call: str) -> str | None:
    """`f(a=1, b="x")` to `{"a": 1, "b": "x"}`; None if it is not a call with plain values."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as on "\\d" in the model's string
            body = ast.parse(call, mode="eval").body
        if not isinstance(body, ast.Call) or body.args:
            return None
        values = {keyword.arg: _value_of(keyword.value) for keyword in body.keywords}
        if None in values:  # **mapping
            return None
        arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
        return arguments if is_text(arguments) else None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _value_of(node: ast.expr) -> Any:
    """The value of a literal, which may contain true, false and null. Raises ValueError."""
    for inner in ast.walk(node):
        for field, child in ast.iter_fields(inner):
            if isinstance(child, list):
                setattr(inner, field, [_as_literal(each) for each in child])
            else:
                setattr(inner, field, _as_literal(child))
    return ast.literal_eval(_as_literal(node))


def _as_literal(node: Any) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_LITERALS:
        return ast.Constant(_JSON_LITERALS[node.id])
    return node
