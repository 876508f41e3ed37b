"""A chat answer's parts in OpenAI's words: a whole message, and a stream's deltas."""

from collections.abc import Iterable
from typing import Any

from penstock.server.output.parts import CallArguments, CallStart, Part, ReasoningPart, TextPart

# DeepSeek's name, which most servers and clients took over, and the one that vLLM has given it
# since. Clients read the one or the other, and those that know both take the first that is there.
_REASONING = ("reasoning_content", "reasoning")


def message_of(parts: Iterable[Part]) -> dict[str, Any]:
    """The assistant's message. content is null where there is none but calls or thoughts."""
    text, reasoning, calls = "", "", list[dict[str, Any]]()
    for part in parts:
        match part:
            case TextPart():
                text += part.text
            case ReasoningPart():
                reasoning += part.text
            case CallStart():
                function = {"name": part.name, "arguments": ""}
                calls.append({"id": part.id, "type": "function", "function": function})
            case CallArguments():
                calls[part.index]["function"]["arguments"] += part.text
    content = text or (None if calls or reasoning else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message |= dict.fromkeys(_REASONING, reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def delta_of(part: Part) -> dict[str, Any]:
    """Id and name come once: clients join what they get."""
    match part:
        case TextPart():
            return {"content": part.text}
        case ReasoningPart():
            return dict.fromkeys(_REASONING, part.text)
        case CallStart():
            function = {"name": part.name, "arguments": ""}
            call = {"index": part.index, "id": part.id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments():
            return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
