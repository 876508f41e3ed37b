"""Anthropic's `/v1/messages` on the wire: its fields, and the same request as a chat completion.

Fields that a chat completion has too are checked there; errors then name the fields of this API.
"""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from penstock.server.errors import InvalidRequest, ThreadUnsupported, UnsupportedParameter
from penstock.server.protocol.chat import ChatCompletionRequest, ContentPart
from penstock.server.protocol.openai import MAX_STOPS, Probability, StopString, Wire
from penstock.server.protocol.translation import (
    SHARED_FIELDS,
    TranslatedRequest,
    check_numbers,
    checked,
    content_of,
)

Block = dict[str, Any]
Blocks = Annotated[list[Block], Field(fail_fast=True)]

# Claude Code sends it with every request. Reasoning is never cleared here.
_KEEP_ALL_REASONING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
# Known but not supported: field -> the values that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "context_management": ({}, {"edits": []}, _KEEP_ALL_REASONING),
}
# The names here of fields of a chat completion, for complaints about them.
_CHAT_TO_MESSAGES = {
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "continue_final_message": "an assistant message at the end",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    ".function.parameters": ".input_schema",
    ".function.name": ".name",
}


class InputMessage(Wire):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class TextBlock(Wire):
    text: str


class ImageSource(Wire):
    """type "file" is refused by name."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(Wire):
    source: ImageSource


class Thinking(Wire):
    thinking: str


class ToolUse(Wire):
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(Wire):
    tool_use_id: str
    content: str | Blocks | None = None


class Tool(Wire):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Wire):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(None, ge=0)


class OutputConfig(Wire):
    effort: str | None = None
    format: dict[str, Any] | None = None


class CountTokensRequest(TranslatedRequest):
    """`POST /v1/messages/count_tokens`: what makes the prompt."""

    neutral = _NEUTRAL
    own_names = _CHAT_TO_MESSAGES
    known_extras = TranslatedRequest.known_extras | {"thread"}

    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    system: str | Blocks | None = None
    tools: Blocks | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: ThinkingConfig | None = None

    def _check(self) -> None:
        check_numbers(
            self.messages and [m.content for m in self.messages],
            self.tools,
            self.model_extra,
        )
        super()._check()
        if (self.model_extra or {}).get("thread") is not None:
            raise ThreadUnsupported
        thinking = self.thinking
        if thinking and thinking.type == "disabled" and thinking.budget_tokens is not None:
            param = "thinking.budget_tokens"
            message = f'{param} cannot be combined with the type "disabled"'
            raise InvalidRequest(message, param=param)

    def chat_fields(self) -> dict[str, Any]:
        messages = _system_messages(self.system)
        for i, message in enumerate(self.messages):
            messages += _chat_messages(message, f"messages[{i}].content")
        fields = {k: v for k, v in (self.model_extra or {}).items() if k in SHARED_FIELDS}
        fields |= {"model": self.model, "messages": messages}
        if self.messages[-1].role == "assistant":  # the answer continues it, as Anthropic's does
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        fields |= self._thinking_fields(fields.get("chat_template_kwargs") or {})
        if self.tools:
            fields["tools"] = [_chat_tool(t, f"tools[{i}]") for i, t in enumerate(self.tools)]
        if self.tool_choice:
            fields["tool_choice"] = _chat_tool_choice(self.tool_choice)
            if self.tools and self.tool_choice.disable_parallel_tool_use:
                fields["parallel_tool_calls"] = False
        if self.output_config and self.output_config.format:
            fields["response_format"] = _chat_format(self.output_config.format)
        return fields

    def _thinking_fields(self, template_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Whether, how much and how long to reason; a model without reasoning ignores it."""
        thinking = self.thinking.type if self.thinking else None
        if thinking == "disabled":  # the word for it in the templates of models that can do both
            return {"chat_template_kwargs": {"enable_thinking": False} | template_kwargs}
        effort = self.output_config.effort if self.output_config else None
        return {
            "reasoning_effort": effort or ("medium" if thinking == "enabled" else None),
            "thinking_token_budget": self.thinking.budget_tokens if self.thinking else None,
        }


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: Probability | None = None
    top_k: int | None = Field(None, ge=0)
    stream: bool | None = None

    def chat_fields(self) -> dict[str, Any]:
        return super().chat_fields() | {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stream": self.stream,
        }


def chat_request(fields: CountTokensRequest, *, thinks: bool) -> ChatCompletionRequest:
    """thinks: whether the model reasons; one that does not meets any reasoning budget. Raises
    InvalidRequest that names the fields of chat completions: see `error_names`."""
    in_chat = fields.chat_fields()
    if not thinks:
        in_chat.pop("thinking_token_budget", None)
    return ChatCompletionRequest.of(in_chat, num_bytes=fields.num_bytes)


def _system_messages(system: str | list[Block] | None) -> list[dict[str, Any]]:
    if isinstance(system, list):
        system = "\n\n".join(_text_of(block, f"system[{i}]") for i, block in enumerate(system))
    return [{"role": "system", "content": system}] if system else []


def _chat_messages(message: InputMessage, at: str) -> list[dict[str, Any]]:
    """Tool results are separate messages in a chat, before the user's text."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    parts, reasoning, calls, results = list[str | ContentPart](), [], [], []
    for i, block in enumerate(message.content):
        here = f"{at}[{i}]"
        match block.get("type"):
            case "tool_use":
                calls.append(_chat_tool_call(checked(ToolUse, block, here)))
            case "tool_result":
                results.append(_chat_tool_message(checked(ToolResult, block, here), here))
            case "thinking":
                reasoning.append(checked(Thinking, block, here).thinking)
            case "redacted_thinking":
                pass  # encrypted: only its maker can read it
            case _ if message.role == "user":
                parts.append(_part_of(block, here))
            case _:
                parts.append(_text_of(block, here))
    said: dict[str, Any] = {"role": message.role, "content": content_of(parts)}
    if reasoning and message.role == "assistant":
        said["reasoning_content"] = "".join(reasoning)
    if calls:
        said["tool_calls"] = calls
    return results + [said] * bool(parts or calls or not results)


def _text_of(block: Block, at: str) -> str:
    if block.get("type") != "text":
        kind = str(block.get("type"))[:64]
        hint = "this server supports text and, of users and in results of tools, images"
        raise UnsupportedParameter(f"{at}.type {kind!r}", hint)
    text: str = checked(TextBlock, block, at).text
    return text


def _part_of(block: Block, at: str) -> str | ContentPart:
    if block.get("type") != "image":
        return _text_of(block, at)
    source, here = checked(ImageBlock, block, at).source, f"{at}.source"
    if source.type not in ("base64", "url"):
        hint = "send the image in base64"
        raise UnsupportedParameter(f"{here}.type {source.type[:64]!r}", hint)
    needed = ("media_type", "data") if source.type == "base64" else ("url",)
    for name in needed:
        if getattr(source, name) is None:
            raise InvalidRequest(f"{here}.{name} is missing", param=f"{here}.{name}")
    url = source.url
    if source.type == "base64":
        url = f"data:{source.media_type};base64,{source.data}"
    return ContentPart.of_image(here, url)


def _chat_tool_call(call: ToolUse) -> dict[str, Any]:
    arguments = msgspec.json.encode(call.input).decode()
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _chat_tool_message(result: ToolResult, at: str) -> dict[str, Any]:
    content: str | list[ContentPart]
    if isinstance(result.content, list):
        blocks = enumerate(result.content)
        content = content_of([_part_of(block, f"{at}.content[{i}]") for i, block in blocks])
    else:
        content = result.content or ""
    return {"role": "tool", "tool_call_id": result.tool_use_id, "content": content}


def _chat_tool(tool: Block, at: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):  # those that Anthropic's own servers run
        kind = str(tool["type"])[:64]
        raise UnsupportedParameter(f"{at}.type {kind!r}", "offer tools that have an input_schema")
    known = checked(Tool, tool, at)
    function = {"name": known.name, "parameters": known.input_schema}
    optional = {"description": known.description, "strict": known.strict}
    function |= {name: value for name, value in optional.items() if value is not None}
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: ToolChoice) -> object:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _chat_format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        kind = str(form.get("type"))[:64]
        raise UnsupportedParameter(f"output_config.format.type {kind!r}", "use json_schema")
    schema = {"name": "output", "strict": True, "schema": form.get("schema")}
    return {"type": "json_schema", "json_schema": schema}
