"""Tools on their way to the model: its chat template, a grammar, and who reads the calls.

Where a chat template knows of no tools, a message tells the model of them in plain words and asks
for bare JSON, and calls and results in the conversation become text. So `tools` works with every
model that takes a system message.
"""

import hashlib
import json
from typing import Any

from server.chat_format import AnswerReader, ChatFormat
from server.errors import InvalidRequest, UnsupportedParameter
from server.prompt import Message
from server.protocol import ChatCompletionRequest
from server.reasoning import ReasoningSplitter
from server.structured import json_schema_grammar
from server.tool_fields import FunctionSpec, Tool, ToolFields
from server.tool_parsers import JsonParser, NamedCallParser, ToolParser, make_tool_parser

# A model that never stops calling would call until its context is full.
MAX_REQUIRED_CALLS = 16

# Nobody reads a call's layout, so no tokens are spent on it.
_WHITESPACE = " ?"

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


def call_grammar(fields: ToolFields) -> str | None:
    """What holds an answer to the calls that must be made. Takes a while; raises InvalidRequest."""
    schema = call_schema(fields)
    if schema is None:
        return None
    try:
        return json_schema_grammar(schema, whitespace=_WHITESPACE)
    except (ValueError, RecursionError) as error:
        message = f"the parameters of tools cannot be compiled to a grammar: {error}"
        raise InvalidRequest(message, param="tools", code="invalid_grammar") from error


def call_schema(fields: ToolFields) -> dict[str, Any] | None:
    """What a whole answer must be where a call is asked for; None where it may be any text."""
    if fields.named_function:
        return arguments_schema(fields.named_function)
    if not fields.must_call:
        return None
    functions = fields.functions
    return {
        "type": "array",
        "minItems": 1,
        "maxItems": 1 if fields.parallel_tool_calls is False else MAX_REQUIRED_CALLS,
        "items": {"anyOf": [_one_call(f, i) for i, f in enumerate(functions)]},
        "$defs": {f"f{i}": _moved(arguments_schema(f), i) for i, f in enumerate(functions)},
    }


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
    fields: ToolFields, form: ChatFormat, splitter: ReasoningSplitter | None
) -> AnswerReader | None:
    """For one answer; None where all of it is plain text."""
    if fields.must_call:  # a grammar leaves no room for thoughts
        return AnswerReader(None, _enforced_parser(fields))
    calls = None
    if fields.functions and form.tools:
        names = frozenset(function.name for function in fields.functions)
        max_calls = 1 if fields.parallel_tool_calls is False else None
        calls = make_tool_parser(form.tools, names, max_calls=max_calls)
    return AnswerReader(splitter, calls) if splitter or calls else None


def _enforced_parser(fields: ToolFields) -> ToolParser | NamedCallParser:
    if fields.named_function:
        return NamedCallParser(fields.named_function.name)
    return JsonParser(frozenset(function.name for function in fields.functions))


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
