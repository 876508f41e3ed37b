"""Grammars of calls in the model's own format.

A model that must write calls in a format that it was not trained on writes worse ones. Where its
own format cannot be enforced, because a schema restricts a string that the format writes without
quotes, or because calls are Python, the calls are JSON: see call_grammar.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.server.structured.lark import ANY_TEXT, literal, nested
from penstock.server.tools.parsers import ToolFormat
from penstock.server.tools.parsers import deepseek as ds
from penstock.server.tools.parsers.schema_values import properties_of, types_of

# The layout of a call is not shown to anyone, so no tokens are spent on it.
WHITESPACE = " ?"
# Keywords that a string without quotes may have: enforced, or annotations.
_UNRESTRICTING = frozenset(("type", "title", "description", "default", "examples", "deprecated"))
_MARKUP = frozenset("<>\"'")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The text around the arguments of a call (prefix, suffix) and around calls (the rest).

    `{name}` is the function's name, `{n}` any small number. is_single: a call ends the answer.
    """

    prefix: str
    suffix: str = ""
    begin: str = ""
    between: str = ""
    end: str = ""
    is_single: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _TaggedShape(_Shape):
    """A shape whose arguments are values without quotes between tags; `{key}` is the name."""

    key: str
    value_end: str


_OBJECT = '{{"name": "{name}", "arguments": '
_SHAPES = {
    ToolFormat.HERMES: _Shape(
        prefix="<tool_call>\n" + _OBJECT, suffix="}}\n</tool_call>", between="\n"
    ),
    ToolFormat.LLAMA3_JSON: _Shape(
        prefix='{{"name": "{name}", "parameters": ', suffix="}}", between="; "
    ),
    ToolFormat.GRANITE: _Shape(
        begin="<|tool_call|>[", prefix=_OBJECT, suffix="}}", between=", ", end="]"
    ),
    ToolFormat.PHI4_MINI_JSON: _Shape(
        begin="<|tool_call|>[", prefix=_OBJECT, suffix="}}", between=", ", end="]<|/tool_call|>"
    ),
    ToolFormat.DEEPSEEK_V3: _Shape(
        begin=ds.CALLS_BEGIN,
        prefix=f"{ds.CALL_BEGIN}function{ds.SEPARATOR}{{name}}\n```json\n",
        suffix=f"\n```{ds.CALL_END}",
        between="\n",
        end=ds.CALLS_END,
    ),
    ToolFormat.DEEPSEEK_V31: _Shape(
        begin=ds.CALLS_BEGIN,
        prefix=f"{ds.CALL_BEGIN}{{name}}{ds.SEPARATOR}",
        suffix=ds.CALL_END,
        end=ds.CALLS_END,
    ),
    ToolFormat.KIMI_K2: _Shape(
        begin="<|tool_calls_section_begin|>",
        prefix="<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>",
        suffix="<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
    ),
    ToolFormat.OPENAI: _Shape(
        prefix="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        is_single=True,
    ),
    ToolFormat.QWEN3_CODER: _TaggedShape(
        prefix="<tool_call>\n<function={name}>\n",
        key="<parameter={key}>\n",
        value_end="\n</parameter>\n",
        suffix="</function>\n</tool_call>",
        between="\n",
    ),
    ToolFormat.SEED_OSS: _TaggedShape(
        prefix="<seed:tool_call>\n<function={name}>\n",
        key="<parameter={key}>",
        value_end="</parameter>\n",
        suffix="</function>\n</seed:tool_call>",
        between="\n",
    ),
    ToolFormat.GLM45: _TaggedShape(
        prefix="<tool_call>{name}\n",
        key="<arg_key>{key}</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
        suffix="</tool_call>",
        between="\n",
    ),
    ToolFormat.MINIMAX_M2: _TaggedShape(
        begin="<minimax:tool_call>\n",
        prefix='<invoke name="{name}">\n',
        key='<parameter name="{key}">',
        value_end="</parameter>\n",
        suffix="</invoke>\n",
        end="</minimax:tool_call>",
    ),
}
# Older Mistral models write a list; newer ones write a name, followed by a special token.
_MISTRAL_LIST = _Shape(begin="[TOOL_CALLS][", prefix=_OBJECT, suffix="}}", between=", ", end="]")
_MISTRAL_NAMED = _Shape(prefix="[TOOL_CALLS]{name}[ARGS]")


def _shape_of(form: ToolFormat | None, special: Mapping[str, int]) -> _Shape | None:
    if form is ToolFormat.MISTRAL:
        return _MISTRAL_NAMED if "[ARGS]" in special else _MISTRAL_LIST
    return _SHAPES.get(form) if form else None


def can_enforce(form: ToolFormat | None, schemas: Mapping[str, dict[str, Any]]) -> bool:
    """Whether a grammar can enforce calls of these functions in the model's own format."""
    shape = _shape_of(form, {})
    if isinstance(shape, _TaggedShape):
        return all(map(_is_plain_object, schemas.values()))
    return shape is not None


def begins_as_json(form: ToolFormat | None) -> bool:
    """Whether a call may begin with the same character as any JSON text, or in harmony with the
    same token as any message."""
    shape = _shape_of(form, {})
    return shape is not None and (
        form is ToolFormat.OPENAI or (shape.begin + shape.prefix)[0] in "{["
    )


def native_call_grammar(
    form: ToolFormat,
    functions: Mapping[str, dict[str, Any]],
    special: Mapping[str, int],
    *,
    max_calls: int,
) -> str:
    """At least one call. functions: name -> schema of the arguments; see `can_enforce`.

    special: text -> id of the special tokens that spell markup.
    """
    shape = _shape_of(form, special)
    assert shape, form
    rules = _Rules(shape, special)
    for name, schema in functions.items():
        rules.add_call(name, schema)
    return rules.grammar(max_calls)


class _Rules:
    """The rules of a grammar while it is built."""

    def __init__(self, shape: _Shape, special: Mapping[str, int]) -> None:
        self._shape = shape
        self._special = special
        self._calls: list[str] = []
        self._lines: list[str] = []
        self._schemas: dict[str, str | dict[str, Any]] = {}

    def add_call(self, name: str, schema: dict[str, Any]) -> None:
        i = len(self._calls)
        if isinstance(self._shape, _TaggedShape):
            arguments = self._tagged_arguments(self._shape, schema, i)
        else:
            arguments = self._json(f"f{i}", schema)
        prefix = self._filled(self._shape.prefix, name=name)
        suffix = self._filled(self._shape.suffix)
        self._lines.append(f"c{i}: {prefix} {arguments} {suffix}")
        self._calls.append(f"c{i}")

    def grammar(self, max_calls: int) -> str:
        shape = self._shape
        max_calls = 1 if shape.is_single else max_calls
        begin, end = self._filled(shape.begin), self._filled(shape.end)
        more = f"({self._filled(shape.between)} call){{0,{max_calls - 1}}}" * (max_calls > 1)
        start = f"start: {begin} call {more} {end}"
        return nested(
            "\n".join([start, f"call: {' | '.join(self._calls)}", *self._lines]), self._schemas
        )

    def _tagged_arguments(self, shape: _TaggedShape, schema: dict[str, Any], i: int) -> str:
        required = schema.get("required", [])
        arguments = []
        for j, (key, of_key) in enumerate(properties_of(schema).items()):
            rule = f"a{i}x{j}"
            name = self._filled(shape.key, key=key)
            self._lines.append(f"{rule}: {name} {self._value(shape, schema, key, of_key, rule)}")
            arguments.append(rule if key in required else f"{rule}?")
        return " ".join(arguments)

    def _value(
        self, shape: _TaggedShape, schema: dict[str, Any], key: str, of_key: Any, rule: str
    ) -> str:
        """The value and the text that ends it."""
        end = self._filled(shape.value_end)
        if types_of(of_key) != {"string"}:
            names = ("$defs", "definitions")
            definitions: dict[str, Any] = {name: schema[name] for name in names if name in schema}
            return f"{self._json(rule, {**schema['properties'][key], **definitions})} {end}"
        if values := _listed(of_key):
            return f"({' | '.join(literal(value, {}) for value in values)}) {end}"
        closing = shape.value_end.strip()
        if closing in self._special:
            self._lines.append(f"{rule}v: {ANY_TEXT}")
            return f"{rule}v {end}"
        self._lines.append(f"{rule}v[suffix={literal(closing, {})}]: {ANY_TEXT}")
        return f"{rule}v {self._filled(shape.value_end.partition(closing)[2])}"

    def _json(self, name: str, schema: dict[str, Any]) -> str:
        self._schemas[name] = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        return f"@{name}"

    def _filled(self, text: str, **names: str) -> str:
        before, number, after = text.partition("{n}")
        rest = f" /[0-9]{{1,3}}/ {self._filled(after, **names)}" if number else ""
        return literal(before.format(**names), self._special) + rest


def _is_plain_object(schema: dict[str, Any]) -> bool:
    """Whether it is an object with declared properties only, whose strings are unrestricted.

    False also for invalid schemas: the JSON grammar refuses them with a message.
    """
    if schema.keys() & {"anyOf", "oneOf", "allOf", "$ref", "patternProperties", "if", "not"}:
        return False
    if schema.get("additionalProperties"):
        return False
    declared, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(declared, dict) or not isinstance(required, list):
        return False
    if not all(isinstance(each, dict) for each in declared.values()):
        return False  # true and false are schemas too
    if not all(map(_is_plain_name, declared)):
        return False
    if not all(isinstance(name, str) and name in declared for name in required):
        return False
    return all(map(_is_plain_value, properties_of(schema).values()))


def _is_plain_value(schema: dict[str, Any]) -> bool:
    if types_of(schema) != {"string"}:
        return True
    if values := _listed(schema):
        return isinstance(values, list) and all(map(_is_plain_text, values))
    return schema.keys() <= _UNRESTRICTING


def _is_plain_name(name: str) -> bool:
    """Whether the name can be read back from between two tags."""
    return name != "" and name == name.strip() and _MARKUP.isdisjoint(name)


def _is_plain_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and "<" not in value and "\n" not in value


def _listed(schema: dict[str, Any]) -> list[str]:
    """The strings that it lists, if it does."""
    values: list[str] = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return values
