"""Tools on their way to the model: its chat template, a grammar, and who reads the calls.

Where a chat template knows of no tools, a message tells the model of them in plain words and asks
for bare JSON, and calls and results in the conversation become text. So `tools` works with every
model that takes a system message.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from penstock.server.errors import InvalidRequest, UnsupportedParameter
from penstock.server.output.reasoning import ReasoningSplitter
from penstock.server.protocol.openai import ChatCompletionRequest
from penstock.server.protocol.tools import FunctionSpec, Tool, ToolFields
from penstock.server.structured.constraint import grammar_of_schema, json_schema_grammar
from penstock.server.structured.lark import nested
from penstock.server.tools.call_grammar import (
    WHITESPACE,
    begins_as_json,
    can_enforce,
    own_call_grammar,
    schemas_of,
)
from penstock.server.tools.chat_format import AnswerReader, ChatFormat
from penstock.server.tools.parsers import (
    JsonParser,
    NamedCallParser,
    ToolFormat,
    ToolParser,
    make_tool_parser,
)

# A message of a conversation, as chat templates know it.
Message = Mapping[str, Any]

_INSTRUCTIONS = """You can call functions. Each line describes one, with a JSON schema of its \
arguments:
{functions}
To call one, answer with nothing but {{"name": ..., "arguments": {{...}}}}, and to call several, \
with a JSON list of such objects. The next message then holds the results. If no function helps, \
answer in plain words."""


def for_template(tools: list[Tool]) -> list[dict[str, Any]]:
    """As chat templates know them: what the client sent."""
    return [tool.model_dump(exclude_unset=True) for tool in tools]


def with_string_arguments(messages: list[Message]) -> list[Message]:
    """For the few templates that paste a call's arguments as they are."""
    return [_map_calls(message, _stringified) for message in messages]


def _stringified(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return call | {"function": call["function"] | {"arguments": arguments}}


def with_short_ids(messages: list[Message]) -> list[Message]:
    """For Mistral's templates, which take ids of nine letters and digits and no others."""
    shortened = [_map_calls(m, lambda call: call | {"id": _short(call["id"])}) for m in messages]
    return [
        {**m, "tool_call_id": _short(m["tool_call_id"])} if m.get("tool_call_id") else m
        for m in shortened
    ]


def _short(call_id: str) -> str:
    if len(call_id) == 9 and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _map_calls(message: Message, change: Any) -> Message:
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [change(call) for call in message["tool_calls"]]}


def told_in_words(messages: list[Message], functions: list[FunctionSpec]) -> list[Message]:
    """The conversation with the functions in its system message."""
    lines = [json.dumps(_described(function), ensure_ascii=False) for function in functions]
    text = _INSTRUCTIONS.format(functions="\n".join(lines))
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _described(function: FunctionSpec) -> dict[str, Any]:
    optional = {"description": function.description, "parameters": function.parameters}
    return {"name": function.name} | {k: v for k, v in optional.items() if v is not None}


def calls_as_text(messages: list[Message]) -> list[Message]:
    """Calls as the assistant's own words, and the results that follow them as one user message."""
    plain: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    is_behind_result = False
    for message in messages:
        if message["role"] == "tool":
            name = names.get(message.get("tool_call_id", ""), message.get("name", "the function"))
            text = f"Result of {name}: {message['content']}"
            if is_behind_result:
                plain[-1]["content"] += f"\n{text}"
            else:
                plain.append({"role": "user", "content": text})
        else:
            calls = message.get("tool_calls") or []
            names |= {call["id"]: call["function"]["name"] for call in calls}
            lines = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
            content = "\n".join([*filter(None, [message["content"]]), *lines])
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            plain.append(rest | {"content": content})
        is_behind_result = message["role"] == "tool"
    return list(plain)


def call_grammar(fields: ToolFields, form: ToolFormat | None, special: Mapping[str, int]) -> str:
    """What holds an answer to calls of these functions. Takes a while; raises InvalidRequest.

    form: the model's own way, which the answer takes where a grammar can say it. special: tokens
    that spell markup, text -> id.
    """
    try:
        if form and _is_enforced_in(form, fields):
            schemas = {function.name: arguments_schema(function) for function in fields.to_call}
            max_calls = fields.max_required_calls
            return own_call_grammar(form, schemas, special, max_calls=max_calls)
        return json_schema_grammar(call_schema(fields), whitespace=WHITESPACE)
    except (ValueError, RecursionError) as error:
        message = f"the parameters of tools cannot be compiled to a grammar: {error}"
        raise InvalidRequest(message, param="tools", code="invalid_grammar") from error


def calls_or_answer(calls: str, answer: str) -> str:
    """Either of two grammars: for an answer in a format that may make calls in its place.

    Two JSON texts become one schema, since both begin with a brace, and llguidance cannot have two
    grammars at once that begin alike. Raises InvalidRequest where `answer` is not of JSON.
    """
    of_answer, of_calls = _json_schema_of(answer), _json_schema_of(calls)
    if of_answer is None:
        raise InvalidRequest(
            "an answer that must follow a regex or grammar leaves no room for calls; leave that "
            'out, or say tool_choice "none" or "required"',
            param="tools",
        )
    if of_calls is None:
        return nested("start: @calls | @answer", {"calls": calls, "answer": answer})
    definitions = {f"f{i}": _moved(each, i) for i, each in enumerate((of_calls, of_answer))}
    return grammar_of_schema(
        {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in definitions], "$defs": definitions}
    )


def _json_schema_of(grammar: str) -> dict[str, Any] | None:
    """The schema that is all of this grammar, if one is."""
    if not grammar.startswith("{"):
        return None
    first, *others = json.loads(grammar)["grammars"]
    schema: dict[str, Any] | None = None if others else first.get("json_schema")
    return schema


def _is_enforced_in(form: ToolFormat | None, fields: ToolFields) -> bool:
    """Whether calls that a grammar holds are written in the model's own way."""
    if not fields.must_call and begins_as_json(form):
        return False  # it stands beside another grammar of JSON: see `calls_or_answer`
    return can_enforce(form, {each.name: arguments_schema(each) for each in fields.to_call})


def call_schema(fields: ToolFields) -> dict[str, Any]:
    """What a whole answer must be where a call is asked for, in JSON: an object, or a list of them.

    A single call is no list, since that is how models write one; so nothing asks for a second.
    """
    if fields.named_function:
        return arguments_schema(fields.named_function)
    functions = fields.functions
    schemas = {f"f{i}": _moved(arguments_schema(f), i) for i, f in enumerate(functions)}
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


def arguments_schema(function: FunctionSpec) -> dict[str, Any]:
    """Of an object; one that lists its properties has no others unless it says so.

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


def _moved(schema: Any, index: int) -> Any:
    """With the references within it made to fit its place in the definitions."""
    if isinstance(schema, list):
        return [_moved(each, index) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, index) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/f{index}{reference[1:]}"
    return moved


def make_reader(
    fields: ChatCompletionRequest, form: ChatFormat, splitter: ReasoningSplitter | None
) -> AnswerReader | None:
    """For one answer; None where all of it is plain text."""
    if fields.must_call or (fields.functions and fields.constraint):
        return AnswerReader(splitter, _enforced_parser(fields, form.tools))
    calls = None
    if fields.functions and form.tools:
        calls = _parser(form.tools, fields.functions, fields.parallel_tool_calls)
    return AnswerReader(splitter, calls) if splitter or calls else None


def _enforced_parser(fields: ToolFields, form: ToolFormat | None) -> ToolParser | NamedCallParser:
    if form and _is_enforced_in(form, fields):
        return _parser(form, fields.to_call, True)
    if fields.named_function:
        return NamedCallParser(fields.named_function.name)
    return JsonParser(frozenset(function.name for function in fields.functions))


def _parser(form: ToolFormat, functions: list[FunctionSpec], parallel: bool | None) -> ToolParser:
    names = frozenset(function.name for function in functions)
    max_calls = 1 if parallel is False else None
    return make_tool_parser(form, names, schemas=schemas_of(functions), max_calls=max_calls)


def check_servable(fields: ChatCompletionRequest, form: ChatFormat) -> None:
    """Raises InvalidRequest for what this server has been told not to do."""
    if fields.chat_template is not None and not form.trusts_templates:
        hint = "start the server with --trust-request-chat-template, or leave it out"
        raise UnsupportedParameter("chat_template", hint)
    if fields.functions and not fields.must_call and form.tools is None:
        raise InvalidRequest(
            "tool_choice auto needs a parser for this model's calls, and this server was started "
            'with --tool-call-parser none; use tool_choice "required", or name a function',
            param="tool_choice",
        )
