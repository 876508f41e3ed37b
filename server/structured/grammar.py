"""The grammar of one answer, written in one pass from a description of what the answer may be.

Nothing else writes grammars for llguidance. One is Lark, or JSON with a list of parts: Lark or a
JSON schema each, the first of which is the start, and the others are referred to by `@name`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from llguidance import LLMatcher

from penstock.server.output.reasoning import ReasoningState

# Between the tokens of a JSON text: nothing, a space, or one or two newlines with indentation. With
# more freedom a model may write whitespace forever. Source: llama.cpp's `space` rule.
WHITESPACE = r"( |\n{1,2}[ \t]{0,20})?"
# Any text, line breaks included.
_ANY_TEXT = "/(?s:.*)/"

# A terminal of any text without what is banned. A complement alone would not be seen to be empty
# once a text is there: llguidance finds that of an intersection.
_UNBANNED = "/(?s:.*)/ & ~(/(?s:.*)/ ({texts}) /(?s:.*)/)"

Parts = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class JsonText:
    """JSON that validates against the schema, whose `x-guidance` holds llguidance's options."""

    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LarkText:
    """Text that follows a grammar in llguidance's Lark."""

    grammar: str


Content = JsonText | LarkText


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """The text around the arguments of a call (prefix, suffix) and around calls (the rest).

    `{name}` is the function's name, `{n}` any small number. is_single: a call ends the answer.
    key, value_end: around each value, if arguments stand between tags; `{key}` is its name.
    """

    prefix: str
    suffix: str = ""
    begin: str = ""
    between: str = ""
    end: str = ""
    is_single: bool = False
    key: str = ""
    value_end: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An argument between tags. value: JSON, one of several texts, or None for any text that does
    not contain the closing tag."""

    key: str
    is_required: bool
    value: JsonText | tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """At least one call in the model's own format. functions: name -> arguments. special: text ->
    id of the special tokens that spell markup."""

    shape: CallShape
    functions: Mapping[str, JsonText | tuple[Argument, ...]]
    max_calls: int
    special: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningBlock:
    """Reasoning before the answer, up to its closing marker.

    token_ids: of the tokens that markers consist of or begin with, which text cannot imitate.
    max_tokens: of the reasoning. It makes a model that may reason do so, since only then can the
    tokens be counted.
    """

    state: ReasoningState
    token_ids: Mapping[str, int]
    max_tokens: int | None


class BannedTexts(NamedTuple):
    """What an answer never contains, however it is divided into tokens. any_case: in upper and
    lower case."""

    exact: tuple[str, ...] = ()
    any_case: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The terminal of all other texts."""
        if not any(self):
            return _ANY_TEXT
        texts = [*map(quoted, self.exact), *(f"{quoted(text)}i" for text in self.any_case)]
        return _UNBANNED.format(texts=" | ".join(texts))


NO_TEXTS = BannedTexts()


class FreeText(NamedTuple):
    """markup_ids: special tokens that may stand in an answer of any text."""

    banned: BannedTexts = NO_TEXTS
    markup_ids: tuple[int, ...] = ()

    @property
    def answer(self) -> str:
        markup = " | ".join(f"<[{i}]>" for i in self.markup_ids)
        return f"TEXT (({markup}) TEXT)*" if markup else "TEXT"

    @property
    def terminal(self) -> str:
        return f"TEXT: {self.banned.text}"


ANY_TEXT = FreeText()


def grammar_text(
    content: Content | None = None,
    calls: Calls | Content | None = None,
    reasoning: ReasoningBlock | None = None,
    free: FreeText = ANY_TEXT,
) -> str | None:
    """The grammar of an answer in llguidance's notation; None if any text will do.

    content: what the answer must be; None for any text. calls: what may stand in its place, or
    must, if there is no content. reasoning: what precedes both. free: what any text is. Two answers
    of JSON become one schema, since both begin with a brace, and llguidance does not support
    alternative grammars that begin alike.
    """
    if calls is None or content is None:
        only = content or calls
        parts = _parts(only) if only else None
    elif isinstance(calls, Calls):
        either = {"calls": _parts(calls), "format": _parts(content)}
        parts = _nested("start: @calls | @format", either)
    else:
        parts = _parts(_either(calls, content))
    if reasoning:
        is_message = isinstance(calls, Calls) and content is None
        parts = _after_reasoning(reasoning, parts, free, is_message=is_message)
    elif parts is None and any(free.banned):
        parts = [{"lark_grammar": f"start: {free.answer}\n{free.terminal}"}]
    if parts is None:
        return None
    lark: str | None = parts[0].get("lark_grammar") if len(parts) == 1 else None
    return lark or json.dumps({"grammars": parts})


def _parts(answer: Calls | Content) -> Parts:
    match answer:
        case JsonText():
            return [{"json_schema": answer.schema}]
        case LarkText():
            return [{"lark_grammar": answer.grammar}]
        case Calls():
            return _CallRules(answer).parts()


def _nested(lark: str, grammars: Mapping[str, Parts]) -> Parts:
    """A grammar in which `@name` refers to one of `grammars`."""
    parts: Parts = [{"lark_grammar": lark}]
    for name, (first, *others) in grammars.items():
        parts += [first | {"name": name}, *others]
    return parts


def _after_reasoning(
    reasoning: ReasoningBlock, answer: Parts | None, free: FreeText, *, is_message: bool
) -> Parts:
    """is_message: the answer has the header of a message already, in models that write messages."""
    markers, token_ids = reasoning.state.markers, reasoning.token_ids
    begin = "" if reasoning.state.is_open else _literal(markers.opening, token_ids)
    block = f"{begin} reasoning {_literal(markers.closing, token_ids)}"
    limit = "" if reasoning.max_tokens is None else f"[max_tokens={reasoning.max_tokens}]"
    rules = [f"reasoning{limit}: TEXT", free.terminal]
    if answer is None:
        lines = [f"start: {block} {free.answer}", *rules]
        return [{"lark_grammar": "\n".join(lines)}]
    is_certain = reasoning.state.is_open or reasoning.max_tokens is not None
    if not markers.answer:
        before = f"{block} " + r"/\n{0,2}/"
        start = f"start: {before if is_certain else f'({before})?'} @answer"
        return _nested("\n".join([start, *rules]), {"answer": answer})
    if not is_message:
        header = _literal(markers.answer, token_ids)
        answer = _nested(f"start: {header} @answer", {"answer": answer})
    # An answer's header begins as the reasoning does, so both must be in the same Lark.
    first, *others = answer
    rest = first["lark_grammar"].replace("start:", "rest:", 1)
    lines = [f"start: {block if is_certain else f'({block})?'} rest", *rules, rest]
    return [{"lark_grammar": "\n".join(lines)}, *others]


class _CallRules:
    """The rules of calls while they are written."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self._shape = calls, calls.shape
        self._lines: list[str] = []
        self._values: dict[str, Parts] = {}

    def parts(self) -> Parts:
        shape = self._shape
        for i, (name, arguments) in enumerate(self._calls.functions.items()):
            if isinstance(arguments, JsonText):
                inner = self._json(f"f{i}", arguments)
            else:
                inner = " ".join(self._tagged(a, f"a{i}x{j}") for j, a in enumerate(arguments))
            prefix, suffix = self._filled(shape.prefix, name=name), self._filled(shape.suffix)
            self._lines.append(f"c{i}: {prefix} {inner} {suffix}")
        max_calls = 1 if shape.is_single else self._calls.max_calls
        more = f"({self._filled(shape.between)} call){{0,{max_calls - 1}}}" * (max_calls > 1)
        names = " | ".join(f"c{i}" for i in range(len(self._calls.functions)))
        start = f"start: {self._filled(shape.begin)} call {more} {self._filled(shape.end)}"
        return _nested("\n".join([start, f"call: {names}", *self._lines]), self._values)

    def _tagged(self, argument: Argument, rule: str) -> str:
        key, value = self._filled(self._shape.key, key=argument.key), self._value(argument, rule)
        self._lines.append(f"{rule}: {key} {value}")
        return rule if argument.is_required else f"{rule}?"

    def _value(self, argument: Argument, rule: str) -> str:
        """The value and the text that ends it."""
        end = self._filled(self._shape.value_end)
        if isinstance(argument.value, JsonText):
            return f"{self._json(rule, argument.value)} {end}"
        if argument.value:
            return f"({' | '.join(map(quoted, argument.value))}) {end}"
        closing = self._shape.value_end.strip()
        if closing in self._calls.special:
            self._lines.append(f"{rule}v: {_ANY_TEXT}")
            return f"{rule}v {end}"
        self._lines.append(f"{rule}v[suffix={quoted(closing)}]: {_ANY_TEXT}")
        return f"{rule}v {self._filled(self._shape.value_end.partition(closing)[2])}"

    def _json(self, name: str, value: JsonText) -> str:
        self._values[name] = _parts(value)
        return f"@{name}"

    def _filled(self, text: str, **names: str) -> str:
        before, number, after = text.partition("{n}")
        rest = f" /[0-9]{{1,3}}/ {self._filled(after, **names)}" if number else ""
        return _literal(before.format(**names), self._calls.special) + rest


def _literal(text: str, special: Mapping[str, int]) -> str:
    """Exactly this text, in which special tokens are themselves. special: text -> id."""
    if not text or not special:
        return quoted(text)
    markers = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    pieces = re.split(f"({markers})", text)
    return " ".join(f"<[{special[p]}]>" if p in special else quoted(p) for p in pieces if p)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_text(
    schema: dict[str, Any], *, whitespace: str = WHITESPACE, is_lenient: bool = False
) -> JsonText:
    """schema: one that llguidance can enforce. whitespace: a regex of what may stand between
    tokens. is_lenient: keywords that cannot be enforced are ignored, not refused. Raises ValueError
    for what llguidance does not read as JSON."""
    options: Any = {"whitespace_pattern": whitespace, "lenient": is_lenient}
    LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    return JsonText({**schema, "x-guidance": options})


def _either(*answers: Content) -> JsonText:
    """One schema of several."""
    definitions = {}
    for i, answer in enumerate(answers):
        assert isinstance(answer, JsonText), answer
        definitions[f"f{i}"] = relocated(answer.schema, f"f{i}")
    choice = [{"$ref": f"#/$defs/{name}"} for name in definitions]
    return json_text({"anyOf": choice, "$defs": definitions})


def relocated(schema: Any, name: str) -> Any:
    """The schema with its references adjusted to its place in `$defs`."""
    if isinstance(schema, list):
        return [relocated(each, name) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: relocated(value, name) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/{name}{reference[1:]}"
    return moved
