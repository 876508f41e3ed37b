"""Text that a model writes to the parts of its answer: what is plain, and which functions it calls.

One state machine for each way of writing calls, fed a little at a time. What may be the markup of
a call is held back until that is certain; if it turns out to be none, it comes out as plain text.
So the parts do not depend on how the text was cut, and no character of a plain text is lost.
Whitespace around a call belongs to its markup. Once a call has started its arguments stream; should
the markup break after that, what was sent stays and the rest is plain text.
"""

import ast
import json
import re
import secrets
import warnings
from collections.abc import Callable
from enum import Enum, StrEnum, auto
from typing import Any

from server.json_scanner import WHITESPACE, Expect, JsonScanner
from server.parts import CallArguments, CallStart, Part, TextPart, merged

# No model writes so much between the marker and the arguments; longer is no call.
_MAX_NAME_CHARS = 256
# The first characters of all markers, and the end of a line, behind which JSON may begin.
_MAY_BEGIN_MARKUP = re.compile(r"[<\[{\n]")


class ToolFormat(StrEnum):
    """How a model writes calls. The names are vLLM's, but for the last."""

    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    PYTHONIC = "pythonic"
    MISTRAL = "mistral"
    JSON = "json"


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ToolParser:
    """What all the machines share. A state is a method that takes one character.

    names: the functions that there are. Markup that a text may well have by chance (bare JSON, a
    list in brackets) counts as a call only of one of these. max_calls: `is_over` turns true when so
    many are complete, and nothing more is taken.
    """

    def __init__(
        self,
        names: frozenset[str],
        *,
        max_calls: int | None = None,
        make_id: Callable[[], str] = new_call_id,
    ) -> None:
        self.num_calls = 0
        self.is_over = False
        self._names = names
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

    def start_call(self, name: str) -> None:
        self._held = self._space = ""
        self._is_behind_call = False
        self._parts.append(CallStart(self.num_calls, self._make_id(), name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        self._parts.append(CallArguments(self.num_calls - 1, text))

    def _end_call(self, then: Callable[[str], None]) -> None:
        self._held = ""
        self._is_behind_call = True
        self._state = then
        self._num_done += 1
        self.is_over = self._num_done == self._max_calls


class _Status(Enum):
    MORE = auto()
    DONE = auto()
    BROKEN = auto()


class _CallObject:
    """`{"name": ..., "arguments": {...}}` as it is written, its keys in any order.

    Starts the call at the parser as soon as the name is known and the arguments begin. They may be
    called "parameters", and be a string that holds JSON.
    """

    _ARGUMENTS = ("arguments", "parameters")
    _STRINGS = ("name", "type", "id")

    def __init__(self, parser: ToolParser, names: frozenset[str] | None) -> None:
        """names: None where any name may be called."""
        self.has_started = False
        self._parser = parser
        self._names = names
        self._scanner = JsonScanner()
        self._key = ""
        self._raw = ""  # the key or value at depth 1 that is being written
        self._seen: set[str] = set()
        self._name: str | None = None
        self._arguments: str | None = None  # where they came before the name

    def feed(self, char: str) -> _Status:
        scanner = self._scanner
        depth, expected = scanner.depth, scanner.expects
        if not scanner.feed(char):
            return _Status.BROKEN
        if scanner.is_done:
            return _Status.DONE if self._finish() else _Status.BROKEN
        if depth == 0 or (depth == 1 and char in WHITESPACE and not self._raw):
            return _Status.MORE
        if depth == 1 and expected in (Expect.COLON, Expect.COMMA_OR_END):
            return _Status.MORE
        if not self._raw and expected is Expect.VALUE and not self._may_begin(char):
            return _Status.BROKEN
        self._raw += char
        if self._is_streaming:
            self._parser.add_arguments(char)
            self._raw = "{"  # only that there is something
        if scanner.depth == 1 and not self._end_item(scanner.expects):
            return _Status.BROKEN
        return _Status.MORE

    @property
    def _is_streaming(self) -> bool:
        return self.has_started and self._key in self._ARGUMENTS

    def _may_begin(self, char: str) -> bool:
        """The first character of a value at depth 1."""
        if self._key in self._STRINGS:
            return char == '"'
        if char == "{" and self._name is not None:
            self._start()
        return char in '{"n'

    def _end_item(self, expects: Expect) -> bool:
        """Whether a key or a value that ends here, if one does, is one that a call has."""
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
            is_name = bool(name) and name.isprintable()  # which lone surrogates are not
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
    """What was written where the arguments belong; None if it is no object."""
    if raw == "null":
        return "{}"
    if raw[0] == '"':
        raw = json.loads(raw).strip(WHITESPACE)
        scanner = JsonScanner()
        is_json = all(not scanner.is_done and scanner.feed(char) for char in raw)
        return raw if is_json and scanner.is_done and raw[0] == "{" and _is_text(raw) else None
    return raw


def _is_text(text: str) -> bool:
    """Without lone surrogates, which JSON can spell and no client can read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class HermesParser(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

    _BEGIN, _END = "<tool_call>", "</tool_call>"

    def _in_text(self, char: str) -> None:
        if self._match(char, (self._BEGIN,)):
            self._held = self._BEGIN
            self._state = self._before_object

    def _before_object(self, char: str) -> None:
        if char in WHITESPACE:
            self._held += char
        elif char == "{":
            self._call = _CallObject(self, None)
            self._state = self._in_object
            self._in_object(char)
        else:
            self._give_up(char)

    def _in_object(self, char: str) -> None:
        match self._call.feed(char):
            case _Status.DONE:
                self._end_call(self._behind_object)
            case _Status.BROKEN:
                self._give_up(char)
            case _ if not self._call.has_started:
                self._held += char

    def _behind_object(self, char: str) -> None:
        """The end marker, which some models forget."""
        self._held += char
        begun = self._held.lstrip(WHITESPACE)
        if begun == self._END:
            self._held = ""
            self._state = self._in_text
        elif not self._END.startswith(begun):
            self._replay(self._release())


class JsonParser(ToolParser):
    """Bare JSON at the beginning of a line: one call, or a list of them. Any model can write it."""

    _MARKERS: tuple[str, ...] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_line_start = True
        self._is_list = False

    def _in_text(self, char: str) -> None:
        if char in "{[" and self._is_line_start and not self._held:
            self._begin(char)
            return
        self._is_line_start = char == "\n" or (self._is_line_start and char in WHITESPACE)
        if marker := self._match(char, self._MARKERS):
            self._held = marker
            self._state = self._behind_marker

    def _begin(self, char: str) -> None:
        self._is_list = char == "["
        if self._is_list:
            self._held += char
            self._state = self._before_item
        else:
            self._begin_object(char)

    def _begin_object(self, char: str) -> None:
        self._call = _CallObject(self, self._names)
        self._state = self._in_object
        self._in_object(char)

    def _behind_marker(self, char: str) -> None:
        if char in WHITESPACE:
            self._held += char
        elif char in "{[":
            self._begin(char)
        else:
            self._give_up(char)

    def _pass_over(self, plain: str) -> None:
        if plain.strip(WHITESPACE):
            self._is_line_start = False

    def _give_up(self, char: str) -> None:
        self._is_line_start = self._held.rstrip(" \t").endswith("\n")
        super()._give_up(char)

    def _before_item(self, char: str) -> None:
        if char in WHITESPACE:
            self._held += char
        elif char == "{":
            self._begin_object(char)
        else:
            self._give_up(char)

    def _in_object(self, char: str) -> None:
        match self._call.feed(char):
            case _Status.DONE:
                self._end_call(self._behind_item if self._is_list else self._behind_call)
            case _Status.BROKEN:
                self._give_up(char)
            case _ if not self._call.has_started:
                self._held += char

    def _behind_item(self, char: str) -> None:
        self._held += char
        if char == ",":
            self._state = self._before_item
        elif char == "]":
            self._held = ""
            self._state = self._behind_call
        elif char not in WHITESPACE:
            self._is_line_start = False
            self._replay(self._release())

    def _behind_call(self, char: str) -> None:
        """Llama separates its calls with a semicolon, others with a comma or a line."""
        if char in "{[":
            self._begin(char)
        elif char in WHITESPACE or (char in ";," and not self._held.strip(WHITESPACE)):
            self._held += char
        else:
            self._is_line_start = "\n" in self._held
            self._say(self._release())
            self._replay(char)


class Llama3JsonParser(JsonParser):
    """`{"name": ..., "parameters": {...}}`, often behind `<|python_tag|>`: Llama 3.1 and later."""

    _MARKERS = ("<|python_tag|>",)


class MistralParser(ToolParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}`."""

    _BEGIN = "[TOOL_CALLS]"
    _NAME = re.compile(r"([\w.-]+)(\[CALL_ID\]\w*)?(\[ARGS\])?\s*")

    def _in_text(self, char: str) -> None:
        if self._match(char, (self._BEGIN,)):
            self._held = self._BEGIN
            self._state = self._behind_marker

    def _behind_marker(self, char: str) -> None:
        if char in WHITESPACE:
            self._held += char
        elif char == "[":
            self._held += char
            self._state = self._before_item
        elif char.isalnum() or char == "_":
            self._written_name = char
            self._held += char
            self._state = self._in_name
        else:
            self._give_up(char)

    def _before_item(self, char: str) -> None:
        if char in WHITESPACE:
            self._held += char
        elif char == "{":
            self._call = _CallObject(self, None)
            self._state = self._in_object
            self._in_object(char)
        else:
            self._give_up(char)

    def _in_object(self, char: str) -> None:
        match self._call.feed(char):
            case _Status.DONE:
                self._end_call(self._behind_item)
            case _Status.BROKEN:
                self._give_up(char)
            case _ if not self._call.has_started:
                self._held += char

    def _behind_item(self, char: str) -> None:
        self._held += char
        if char == ",":
            self._state = self._before_item
        elif char == "]":
            self._held = ""
            self._state = self._in_text
        elif char not in WHITESPACE:
            self._replay(self._release())

    def _in_name(self, char: str) -> None:
        if char == "{":
            if found := self._NAME.fullmatch(self._written_name):
                self.start_call(found[1])
                self._scanner = JsonScanner()
                self._state = self._in_arguments
                self._in_arguments(char)
                return
        elif len(self._written_name) < _MAX_NAME_CHARS:
            self._written_name += char
            self._held += char
            return
        self._give_up(char)

    def _in_arguments(self, char: str) -> None:
        if not self._scanner.feed(char):
            self._give_up(char)
            return
        self.add_arguments(char)
        if self._scanner.is_done:
            self._end_call(self._in_text)


class PythonicParser(ToolParser):
    """`[f(a=1), g(b="x")]` at the beginning of a line: Llama 3.2's and 4's other way.

    The arguments are Python, so each call comes whole, when it has been read to its end.
    """

    _BEGIN, _END = "<|python_start|>", "<|python_end|>"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_line_start = True
        self._written_call = ""
        self._depth = 0
        self._quote = ""  # of the string that is open
        self._is_escaped = False

    def _in_text(self, char: str) -> None:
        if char == "[" and self._is_line_start and not self._held:
            self._held = char
            self._state = self._before_call
            return
        self._is_line_start = char == "\n" or (self._is_line_start and char in WHITESPACE)
        marker = self._match(char, (self._BEGIN, self._END) if self.num_calls else (self._BEGIN,))
        if marker == self._BEGIN:
            self._held = marker
            self._state = self._behind_marker

    def _behind_marker(self, char: str) -> None:
        if char in WHITESPACE:
            self._held += char
        elif char == "[":
            self._held += char
            self._state = self._before_call
        else:
            self._give_up(char)

    def _before_call(self, char: str) -> None:
        if char in WHITESPACE:
            self._held += char
        elif char.isalpha() or char == "_":
            self._held += char
            self._written_call = char
            self._state = self._in_name
        else:
            self._give_up(char)

    def _in_name(self, char: str) -> None:
        if char == "(" and self._written_call in self._names:
            self._held += char
            self._depth, self._quote, self._is_escaped = 1, "", False
            self._name = self._written_call
            self._written_call = "f("
            self._state = self._in_call
        elif (char.isalnum() or char in "_.-") and len(self._written_call) < _MAX_NAME_CHARS:
            self._held += char
            self._written_call += char
        else:
            self._give_up(char)

    def _in_call(self, char: str) -> None:
        self._held += char
        self._written_call += char
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
        arguments = _keywords_as_json(self._written_call)
        if arguments is None:
            self._is_line_start = False
            self._give_up("")
            return
        self.start_call(self._name)
        self.add_arguments(arguments)
        self._end_call(self._behind_python_call)

    def _behind_python_call(self, char: str) -> None:
        self._held += char
        if char == ",":
            self._state = self._before_call
        elif char == "]":
            self._held = ""
            self._state = self._in_text
        elif char not in WHITESPACE:
            self._is_line_start = False
            self._replay(self._release())

    def _pass_over(self, plain: str) -> None:
        if plain.strip(WHITESPACE):
            self._is_line_start = False

    def _give_up(self, char: str) -> None:
        self._is_line_start = self._held.rstrip(" \t").endswith("\n")
        super()._give_up(char)


_JSON_WORDS = {"true": True, "false": False, "null": None}


def _keywords_as_json(call: str) -> str | None:
    """`f(a=1, b="x")` to `{"a": 1, "b": "x"}`; None where it is no call with plain values."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\\d" is the model's affair
            body = ast.parse(call, mode="eval").body
        if not isinstance(body, ast.Call) or body.args:
            return None
        values = {keyword.arg: _value_of(keyword.value) for keyword in body.keywords}
        if None in values:  # **mapping
            return None
        arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
        return arguments if _is_text(arguments) else None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _value_of(node: ast.expr) -> Any:
    """A literal, in which JSON's own words may stand for Python's. Raises ValueError."""
    for inner in ast.walk(node):
        for field, child in ast.iter_fields(inner):
            if isinstance(child, list):
                setattr(inner, field, [_as_literal(each) for each in child])
            else:
                setattr(inner, field, _as_literal(child))
    return ast.literal_eval(_as_literal(node))


def _as_literal(node: Any) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_WORDS:
        return ast.Constant(_JSON_WORDS[node.id])
    return node


_PARSERS: dict[ToolFormat, type[ToolParser]] = {
    ToolFormat.HERMES: HermesParser,
    ToolFormat.LLAMA3_JSON: Llama3JsonParser,
    ToolFormat.PYTHONIC: PythonicParser,
    ToolFormat.MISTRAL: MistralParser,
    ToolFormat.JSON: JsonParser,
}


def make_tool_parser(
    form: ToolFormat, names: frozenset[str], *, max_calls: int | None = None
) -> ToolParser:
    return _PARSERS[form](names, max_calls=max_calls)


class NamedCallParser:
    """The whole answer is the arguments of one call, as a grammar has seen to."""

    def __init__(self, name: str, make_id: Callable[[], str] = new_call_id) -> None:
        self.num_calls = 0
        self.is_over = False
        self._name = name
        self._make_id = make_id

    def feed(self, text: str) -> list[Part]:
        if not text:
            return []
        parts: list[Part] = [CallArguments(0, text)]
        if not self.num_calls:
            self.num_calls = 1
            parts.insert(0, CallStart(0, self._make_id(), self._name))
        return parts

    def end(self) -> list[Part]:
        return []
