"""Tools in the prompt: what a chat template receives of them, and of calls in the conversation.

If a chat template does not support tools, a message describes them in plain words and asks for bare
JSON, and calls and results in the conversation become text. So `tools` works with every model that
accepts a system message.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.server.tools.rules import Function

# A message of a conversation, as chat templates know it.
Message = Mapping[str, Any]
Content = str | list[Mapping[str, Any]]

_INSTRUCTIONS = """You can call functions. Each line describes one, with a JSON schema of its \
arguments:
{functions}
To call one, answer with nothing but {{"name": ..., "arguments": {{...}}}}, and to call several, \
with a JSON list of such objects. The next message then holds the results. If no function helps, \
answer in plain words."""


def with_string_arguments(messages: list[Message]) -> list[Message]:
    """For the few templates that insert the arguments of calls as text."""
    return [_map_calls(message, _stringified) for message in messages]


def _stringified(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return call | {"function": call["function"] | {"arguments": arguments}}


def with_short_ids(messages: list[Message]) -> list[Message]:
    """For Mistral's templates, which accept only ids of nine letters and digits."""
    shortened = [_map_calls(m, lambda call: call | {"id": _short(call["id"])}) for m in messages]
    return [
        {**m, "tool_call_id": _short(m["tool_call_id"])} if m.get("tool_call_id") else m
        for m in shortened
    ]


def _short(call_id: str) -> str:
    if len(call_id) == 9 and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _map_calls(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [change(call) for call in message["tool_calls"]]}


def with_instructions(messages: list[Message], functions: Iterable[Function]) -> list[Message]:
    """The conversation with a description of the functions in its system message."""
    lines = [json.dumps(_described(function), ensure_ascii=False) for function in functions]
    text = _INSTRUCTIONS.format(functions="\n".join(lines))
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _described(function: Function) -> dict[str, Any]:
    optional = {"description": function.description, "parameters": function.parameters}
    return {"name": function.name} | {k: v for k, v in optional.items() if v is not None}


def joined(*contents: Content) -> Content:
    """The contents of messages as one: text, or a list of parts where one of them is that."""
    if all(isinstance(content, str) for content in contents):
        return "".join(map(str, contents))
    parts: list[Mapping[str, Any]] = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def calls_as_text(messages: list[Message]) -> list[Message]:
    """Calls as text of the assistant, and the results that follow them as one user message."""
    plain: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    follows_result = False
    for message in messages:
        if message["role"] == "tool":
            name = names.get(message.get("tool_call_id", ""), message.get("name", "the function"))
            result = joined(f"Result of {name}: ", message["content"])
            if follows_result:
                plain[-1]["content"] = joined(plain[-1]["content"], "\n", result)
            else:
                plain.append({"role": "user", "content": result})
        else:
            calls = message.get("tool_calls") or []
            names |= {call["id"]: call["function"]["name"] for call in calls}
            lines = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
            content = message["content"]
            if lines:  # then it is the assistant's, and text
                content = "\n".join([*filter(None, [content]), *lines])
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            plain.append(rest | {"content": content})
        follows_result = message["role"] == "tool"
    return list(plain)
