"""Grammars of calls: in the model's own format if possible, else in JSON."""

import json
from collections.abc import Mapping
from typing import Any

from penstock.server.errors import InvalidRequest
from penstock.server.protocol.tool_specs import FunctionSpec
from penstock.server.protocol.tools import ToolFields
from penstock.server.structured.constraint import (
    grammar_of_schema,
    json_schema_grammar,
    lark_grammar,
)
from penstock.server.structured.lark import nested
from penstock.server.structured.limits import check_schema
from penstock.server.tools.native_grammar import (
    WHITESPACE,
    begins_as_json,
    can_enforce,
    native_call_grammar,
)
from penstock.server.tools.parsers import ToolFormat


def call_grammar(fields: ToolFields, form: ToolFormat | None, special: Mapping[str, int]) -> str:
    """The grammar of calls of these functions. May take a while; raises InvalidRequest.

    form: the model's own format, which is used if a grammar can enforce it. special: text -> id of
    the special tokens that spell markup.
    """
    try:
        if fields.raw_call and fields.raw_call.lark is not None:
            return lark_grammar(fields.raw_call.lark)
        for function in fields.functions:
            check_schema(function.parameters or {})
        if form and uses_native_format(form, fields):
            schemas = {function.name: _arguments_schema(function) for function in fields.to_call}
            max_calls = fields.max_required_calls
            return native_call_grammar(form, schemas, special, max_calls=max_calls)
        return json_schema_grammar(_call_schema(fields), whitespace=WHITESPACE)
    except (ValueError, RecursionError) as error:
        message = f"the parameters of tools cannot be compiled to a grammar: {error}"
        raise InvalidRequest(message, param="tools", code="invalid_grammar") from error


def calls_or_answer(calls: str, answer: str) -> str:
    """Either of two grammars: calls, or an answer that follows a response format.

    Two grammars of JSON become one schema, since both begin with a brace, and llguidance does not
    support alternative grammars that begin alike. Raises InvalidRequest if `answer` is not JSON.
    """
    of_answer, of_calls = _json_schema_of(answer), _json_schema_of(calls)
    if of_answer is None:
        raise InvalidRequest(
            "a regex or grammar cannot be combined with tools that the model may call; leave it "
            'out, or set tool_choice to "none" or "required"',
            param="tools",
        )
    if of_calls is None:
        return nested("start: @calls | @answer", {"calls": calls, "answer": answer})
    definitions = {f"f{i}": _relocated(each, i) for i, each in enumerate((of_calls, of_answer))}
    return grammar_of_schema(
        {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in definitions], "$defs": definitions}
    )


def _json_schema_of(grammar: str) -> dict[str, Any] | None:
    """The schema, if the grammar consists of a single JSON schema."""
    if not grammar.startswith("{"):
        return None
    first, *others = json.loads(grammar)["grammars"]
    schema: dict[str, Any] | None = None if others else first.get("json_schema")
    return schema


def uses_native_format(form: ToolFormat | None, fields: ToolFields) -> bool:
    """Whether enforced calls are in the model's own format."""
    if not fields.must_call and begins_as_json(form):
        return False  # an alternative grammar of JSON begins alike: see `calls_or_answer`
    return can_enforce(form, {each.name: _arguments_schema(each) for each in fields.to_call})


def _call_schema(fields: ToolFields) -> dict[str, Any]:
    """The schema of a whole answer that consists of calls: one object, or a list of them.

    A single call is not a list, which is how models write it and does not suggest a second call.
    """
    if fields.named_function:
        return _arguments_schema(fields.named_function)
    functions = fields.functions
    schemas = {f"f{i}": _relocated(_arguments_schema(f), i) for i, f in enumerate(functions)}
    call = {"anyOf": [_one_call(f, i) for i, f in enumerate(functions)]}
    if fields.max_required_calls == 1:
        return {**call, "$defs": schemas}
    several = {
        "type": "array",
        "minItems": 1,
        "maxItems": fields.max_required_calls,
        "items": {"$ref": "#/$defs/call"},
    }
    return {"anyOf": [{"$ref": "#/$defs/call"}, several], "$defs": {**schemas, "call": call}}


def _one_call(function: FunctionSpec, index: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function.name},
            "arguments": {"$ref": f"#/$defs/f{index}"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _arguments_schema(function: FunctionSpec) -> dict[str, Any]:
    """The schema of a call's arguments: an object, without undeclared properties by default.

    Raises InvalidRequest.
    """
    schema = dict(function.parameters or {"properties": {}})
    if "$ref" not in schema and schema.setdefault("type", "object") != "object":
        raise InvalidRequest(
            f'the parameters of the function {function.name!r} must have the type "object"',
            param="tools",
        )
    if "properties" in schema and not schema.keys() & {"anyOf", "oneOf", "allOf"}:
        schema.setdefault("additionalProperties", "patternProperties" in schema)
    return schema


def _relocated(schema: Any, index: int) -> Any:
    """The schema with its references adjusted to its place in `$defs`."""
    if isinstance(schema, list):
        return [_relocated(each, index) for each in schema]
    if not isinstance(schema, dict):
        return schema
    relocated = {key: _relocated(value, index) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        relocated["$ref"] = f"#/$defs/f{index}{reference[1:]}"
    return relocated
