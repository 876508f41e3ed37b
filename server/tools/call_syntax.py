"""How enforced calls are written: in the model's own format if a grammar can enforce it, else in
JSON.

A model that must write calls in a format that it was not trained on writes worse ones. Its own
format cannot be enforced where a schema restricts a string that the format writes without quotes,
or where calls are Python.
"""

from collections.abc import Mapping
from typing import Any

from penstock.server.errors import InvalidRequest
from penstock.server.structured.constraint import enforced_json, lark_text
from penstock.server.structured.grammar import (
    Argument,
    Calls,
    CallShape,
    Content,
    JsonText,
    LarkText,
    relocated,
)
from penstock.server.structured.limits import check_schema
from penstock.server.tools.parsers import ToolFormat
from penstock.server.tools.parsers import header_calls as ds
from penstock.server.tools.parsers.schema_values import properties_of, types_of
from penstock.server.tools.rules import CallRules, Function

# The layout of a call is not shown to anyone, so no tokens are spent on it.
_WHITESPACE = " ?"
# Keywords that a string without quotes may have: enforced, or annotations.
_UNRESTRICTING = frozenset(("type", "title", "description", "default", "examples", "deprecated"))
_MARKUP = frozenset("<>\"'")

_OBJECT = '{{"name": "{name}", "arguments": '
_SHAPES = {
    ToolFormat.HERMES: CallShape(
        prefix="<tool_call>\n" + _OBJECT, suffix="}}\n</tool_call>", between="\n"
    ),
    ToolFormat.LLAMA3_JSON: CallShape(
        prefix='{{"name": "{name}", "parameters": ', suffix="}}", between="; "
    ),
    ToolFormat.GRANITE: CallShape(
        begin="<|tool_call|>[", prefix=_OBJECT, suffix="}}", between=", ", end="]"
    ),
    ToolFormat.PHI4_MINI_JSON: CallShape(
        begin="<|tool_call|>[", prefix=_OBJECT, suffix="}}", between=", ", end="]<|/tool_call|>"
    ),
    ToolFormat.DEEPSEEK_V3: CallShape(
        begin=ds.CALLS_BEGIN,
        prefix=f"{ds.CALL_BEGIN}function{ds.SEPARATOR}{{name}}\n```json\n",
        suffix=f"\n```{ds.CALL_END}",
        between="\n",
        end=ds.CALLS_END,
    ),
    ToolFormat.DEEPSEEK_V31: CallShape(
        begin=ds.CALLS_BEGIN,
        prefix=f"{ds.CALL_BEGIN}{{name}}{ds.SEPARATOR}",
        suffix=ds.CALL_END,
        end=ds.CALLS_END,
    ),
    ToolFormat.KIMI_K2: CallShape(
        begin="<|tool_calls_section_begin|>",
        prefix="<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>",
        suffix="<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
    ),
    ToolFormat.OPENAI: CallShape(
        prefix="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        is_single=True,
    ),
    ToolFormat.QWEN3_CODER: CallShape(
        prefix="<tool_call>\n<function={name}>\n",
        key="<parameter={key}>\n",
        value_end="\n</parameter>\n",
        suffix="</function>\n</tool_call>",
        between="\n",
    ),
    ToolFormat.SEED_OSS: CallShape(
        prefix="<seed:tool_call>\n<function={name}>\n",
        key="<parameter={key}>",
        value_end="</parameter>\n",
        suffix="</function>\n</seed:tool_call>",
        between="\n",
    ),
    ToolFormat.GLM45: CallShape(
        prefix="<tool_call>{name}\n",
        key="<arg_key>{key}</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
        suffix="</tool_call>",
        between="\n",
    ),
    ToolFormat.MINIMAX_M2: CallShape(
        begin="<minimax:tool_call>\n",
        prefix='<invoke name="{name}">\n',
        key='<parameter name="{key}">',
        value_end="</parameter>\n",
        suffix="</invoke>\n",
        end="</minimax:tool_call>",
    ),
}
# Older Mistral models write a list; newer ones write a name, followed by a special token.
_MISTRAL_LIST = CallShape(begin="[TOOL_CALLS][", prefix=_OBJECT, suffix="}}", between=", ", end="]")
_MISTRAL_NAMED = CallShape(prefix="[TOOL_CALLS]{name}[ARGS]")


def call_syntax(
    rules: CallRules, form: ToolFormat | None, special: Mapping[str, int]
) -> Calls | Content:
    """Calls of these functions. May take a while; raises InvalidRequest. form: the model's own
    format. special: text -> id of the special tokens that spell markup."""
    try:
        if rules.raw_call and rules.raw_call.lark is not None:
            return lark_text(rules.raw_call.lark)
        for function in rules.functions:
            check_schema(function.parameters or {})
        schemas = {function.name: _arguments_schema(function) for function in rules.to_call}
        # An alternative grammar of JSON begins alike: see `grammar_text`.
        calls = None
        if form and (rules.must_call or not _begins_as_json(form)):
            calls = native_calls(form, schemas, special, max_calls=rules.max_required_calls)
        return calls or enforced_json(_call_schema(rules), whitespace=_WHITESPACE)
    except (ValueError, RecursionError) as error:
        message = f"the parameters of tools cannot be compiled to a grammar: {error}"
        raise InvalidRequest(message, param="tools", code="invalid_grammar") from error


def check_alternative(answer: Content) -> None:
    """Raises InvalidRequest for an answer that cannot be an alternative to calls."""
    if isinstance(answer, LarkText):
        raise InvalidRequest(
            "a regex or grammar cannot be combined with tools that the model may call; leave it "
            'out, or set tool_choice to "none" or "required"',
            param="tools",
        )


def native_calls(
    form: ToolFormat,
    schemas: Mapping[str, dict[str, Any]],
    special: Mapping[str, int],
    *,
    max_calls: int,
) -> Calls | None:
    """Calls in the model's own format; None where a grammar cannot enforce it. schemas: of the
    arguments, by the functions' names."""
    shape = _shape_of(form, special)
    if shape is None or (shape.key and not all(map(_is_plain_object, schemas.values()))):
        return None
    arguments = _tagged if shape.key else _json
    functions = {name: arguments(schema) for name, schema in schemas.items()}
    return Calls(shape=shape, functions=functions, max_calls=max_calls, special=special)


def _shape_of(form: ToolFormat, special: Mapping[str, int]) -> CallShape | None:
    if form is ToolFormat.MISTRAL:
        return _MISTRAL_NAMED if "[ARGS]" in special else _MISTRAL_LIST
    return _SHAPES.get(form)


def _begins_as_json(form: ToolFormat) -> bool:
    """Whether a call may begin with the same character as any JSON text, or in harmony with the
    same token as any message."""
    shape = _shape_of(form, {})
    return shape is not None and (
        form is ToolFormat.OPENAI or (shape.begin + shape.prefix)[0] in "{["
    )


def _json(schema: dict[str, Any]) -> JsonText:
    return JsonText({**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}})


def _tagged(schema: dict[str, Any]) -> tuple[Argument, ...]:
    required = schema.get("required", [])
    return tuple(
        Argument(key=key, is_required=key in required, value=_value(schema, key, resolved))
        for key, resolved in properties_of(schema).items()
    )


def _value(schema: dict[str, Any], key: str, resolved: Any) -> JsonText | tuple[str, ...] | None:
    if types_of(resolved) == {"string"}:
        return tuple(_listed(resolved)) or None
    names = ("$defs", "definitions")
    definitions: dict[str, Any] = {name: schema[name] for name in names if name in schema}
    return _json({**schema["properties"][key], **definitions})


def _call_schema(rules: CallRules) -> dict[str, Any]:
    """The schema of a whole answer that consists of calls: one object, or a list of them. A single
    call is not a list, which is how models write it and does not suggest a second call."""
    if rules.named:
        return _arguments_schema(rules.named)
    functions = rules.functions
    schemas = {f"f{i}": relocated(_arguments_schema(f), f"f{i}") for i, f in enumerate(functions)}
    call = {"anyOf": [_one_call(f, i) for i, f in enumerate(functions)]}
    if rules.max_required_calls == 1:
        return {**call, "$defs": schemas}
    several = {
        "type": "array",
        "minItems": 1,
        "maxItems": rules.max_required_calls,
        "items": {"$ref": "#/$defs/call"},
    }
    return {"anyOf": [{"$ref": "#/$defs/call"}, several], "$defs": {**schemas, "call": call}}


def _one_call(function: Function, index: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function.name},
            "arguments": {"$ref": f"#/$defs/f{index}"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _arguments_schema(function: Function) -> dict[str, Any]:
    """The schema of a call's arguments: an object, without undeclared properties by default. Raises
    InvalidRequest."""
    schema = dict(function.parameters or {"properties": {}})
    if "$ref" not in schema and schema.setdefault("type", "object") != "object":
        raise InvalidRequest(
            f'the parameters of the function {function.name!r} must have the type "object"',
            param="tools",
        )
    if "properties" in schema and not schema.keys() & {"anyOf", "oneOf", "allOf"}:
        schema.setdefault("additionalProperties", "patternProperties" in schema)
    return schema


def _is_plain_object(schema: dict[str, Any]) -> bool:
    """Whether it is an object with declared properties only, whose strings are unrestricted. False
    also for invalid schemas: the JSON grammar refuses them with a message."""
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
