"""`/v1/responses` on the wire: what it takes, and the same as a chat completion.

Everything that a chat completion takes too is checked there, not here; its complaints then get the
names of this API's fields. A conversation is held as items, as the client sent them
and as we answered, because that is what the store keeps and gives back.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.server.errors import InvalidRequest, UnsupportedParameter
from penstock.server.protocol.chat import ChatCompletionRequest, ContentPart
from penstock.server.protocol.invalid_fields import report_unused
from penstock.server.protocol.openai import MAX_LOGPROBS, NEUTRAL, Probability, RequestName, Wire
from penstock.server.protocol.tools import arguments_of
from penstock.server.protocol.translation import (
    SHARED_FIELDS,
    TranslatedRequest,
    check_numbers,
    checked,
    content_of,
)

Item = dict[str, Any]
Items = Annotated[list[Item], Field(fail_fast=True)]
# All but the last request what no response of ours has: results of tools that a server runs,
# pictures, and encrypted reasoning.
Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]

_HINTS = {
    "messages": "use input",
    "reasoning_effort": "use reasoning.effort",
    "verbosity": "use text.verbosity",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "background": "leave it out, and keep the connection open or stream",
    "conversation": "use previous_response_id",
    "logprobs": 'use include: ["message.output_text.logprobs"]',
}
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **NEUTRAL,
    **dict.fromkeys(ChatCompletionRequest.model_fields, ()),
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "moderation": (),
    "access_programs": (),
    "image": ({},),
    "context_management": ([],),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "include_reasoning": (True,),
    "truncation_side": ("left",),
}
for _name in SHARED_FIELDS:
    _NEUTRAL.pop(_name, None)
# Run by OpenAI's own servers, or known to its models; Codex sends some with every request.
_HOSTED_TOOLS = frozenset(
    (
        *("web_search", "web_search_preview", "file_search", "code_interpreter", "mcp"),
        *("computer", "computer_use", "computer_use_preview", "image_generation", "tool_search"),
        *("local_shell", "shell", "apply_patch", "namespace"),
    )
)
_SERVED_TOOLS = ("function", "custom")
_DATE = re.compile(r"_\d{4}_\d{2}_\d{2}$")
# The names here of fields of a chat completion, for complaints about them.
_CHAT_TO_RESPONSES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "tool_choice.allowed_tools.": "tool_choice.",
    ".custom.format.grammar.": ".format.",
    ".function.": ".",
    ".custom.": ".",
}
_LOGPROBS = "message.output_text.logprobs"


class TextConfig(Wire):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningConfig(Wire):
    effort: str | None = None
    summary: str | None = None


class InputPart(Wire):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None


InputParts = Annotated[list[InputPart], Field(fail_fast=True)]


class InputMessage(Wire):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | InputParts


class Reasoning(Wire):
    """Reasoning of ours that the client sends back; encrypted reasoning of others is ignored."""

    content: Annotated[list[ContentPart], Field(fail_fast=True)] | None = None


class FunctionCall(Wire):
    call_id: str
    name: str
    arguments: str


class CustomToolCall(Wire):
    call_id: str
    name: str
    input: str


class CallOutput(Wire):
    """The result of a function or a custom tool."""

    call_id: str
    output: str | InputParts


class ResponsesRequest(TranslatedRequest):
    """`POST /v1/responses`."""

    neutral = _NEUTRAL
    hints = _HINTS
    own_names = _CHAT_TO_RESPONSES

    input: str | Items | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Items | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = Field(
        None, ge=1, lt=2**31
    )  # of tools that a server runs; we run none
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: Probability | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: list[Includable] | None = None
    request_id: RequestName | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None  # has but the padding of events, which we never do
    store: bool | None = None
    # Echoed, or for a provider's accounting: without effect on an answer.
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    def _check(self) -> None:
        check_numbers(
            self.input,
            self.tools,
            self.tool_choice,
            self.text and self.text.format,
            self.model_extra,
        )
        super()._check()
        if self.input is None and self.previous_response_id is None:
            message = "input is missing; it may be left out only with a previous_response_id"
            raise InvalidRequest(message, param="input", code="missing_required_parameter")
        self._check_tools()

    @property
    def input_items(self) -> list[Item]:
        """A plain text is the message of a user."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input or []

    def _check_tools(self) -> None:
        """Reports the tools that are skipped. Raises UnsupportedParameter for unknown ones."""
        for i, tool in enumerate(self.tools or ()):
            kind = str(tool.get("type"))[:64]
            if _DATE.sub("", kind) in _HOSTED_TOOLS:
                report_unused(f"a tool of the type {kind}", "this server runs no tools")
            elif kind not in _SERVED_TOOLS:
                param, hint = f"tools[{i}].type", "send tools of the types function and custom"
                raise UnsupportedParameter(f"{param} {kind!r}", hint)

    @property
    def served_tools(self) -> list[Item]:
        """The tools that we can serve. Hosted ones are skipped: Codex always sends some."""
        return [tool for tool in self.tools or () if tool.get("type") in _SERVED_TOOLS]

    @property
    def tool_indexes(self) -> list[int]:
        return [i for i, tool in enumerate(self.tools or ()) if tool.get("type") in _SERVED_TOOLS]

    def chat_fields(self, history: list[Item], items: list[Item]) -> dict[str, Any]:
        """As a chat completion has them. history: the items of the responses before this one.
        items: those of `input_items` that the prompt is to contain."""
        fields = {k: v for k, v in (self.model_extra or {}).items() if k in SHARED_FIELDS}
        fields |= {
            "model": self.model,
            "messages": _messages(self.instructions, history, items),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": self.num_logprobs is not None,
            "top_logprobs": self.num_logprobs,
            "stream": self.stream,
        }
        if self.served_tools:
            fields["tools"] = [_chat_tool(tool) for tool in self.served_tools]
            fields["parallel_tool_calls"] = self.parallel_tool_calls
        fields["tool_choice"] = _chat_tool_choice(self.tool_choice)
        if self.reasoning and self.reasoning.effort:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.text and self.text.verbosity:
            fields["verbosity"] = self.text.verbosity
        if self.text and self.text.format and self.text.format.get("type") != "text":
            fields["response_format"] = _chat_format(self.text.format)
        return fields

    @property
    def num_logprobs(self) -> int | None:
        """As `SamplingParams.num_logprobs`."""
        return (self.top_logprobs or 0) if _LOGPROBS in (self.include or ()) else None


def chat_request(
    fields: ResponsesRequest, history: list[Item], items: list[Item], *, history_bytes: int = 0
) -> ChatCompletionRequest:
    """See `chat_fields`. Raises InvalidRequest that names the fields of chat completions: see
    `error_names`."""
    return ChatCompletionRequest.of(
        fields.chat_fields(history, items), num_bytes=fields.num_bytes + history_bytes
    )


def _messages(
    instructions: str | None, history: list[Item], items: list[Item]
) -> list[dict[str, Any]]:
    """One system message at the front, where templates want it, then the conversation."""
    messages: list[dict[str, Any]] = []
    for item in history:
        _add(messages, item, "previous_response_id")
    for i, item in enumerate(items):
        _add(messages, item, f"input[{i}]")
    num_leading = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    leading = [message["content"] for message in messages[:num_leading]]
    system = "\n\n".join(filter(None, (instructions, *leading)))
    return [{"role": "system", "content": system}] * bool(system) + messages[num_leading:]


def _add(messages: list[dict[str, Any]], item: Item, at: str) -> None:
    """Adds the item to the chat, where a turn's text and its calls are one message."""
    match item.get("type", "message"):
        case "message":
            said = _chat_message(checked(InputMessage, item, at), at)
            if said["role"] == "assistant":
                _turn(messages)["content"] = said["content"]
            else:
                messages.append(said)
        case "function_call":
            call = checked(FunctionCall, item, at)
            arguments_of(call.arguments, f"{at}.arguments")
            function = {"name": call.name, "arguments": call.arguments}
            _add_call(messages, call.call_id, {"type": "function", "function": function})
        case "custom_tool_call":
            call = checked(CustomToolCall, item, at)
            custom = {"name": call.name, "input": call.input}
            _add_call(messages, call.call_id, {"type": "custom", "custom": custom})
        case "function_call_output" | "custom_tool_call_output":
            output = checked(CallOutput, item, at)
            content = _content(output.output, f"{at}.output")
            messages.append({"role": "tool", "tool_call_id": output.call_id, "content": content})
        case "reasoning":
            reasoning = checked(Reasoning, item, at).content or ()
            text = "".join(part.text or "" for part in reasoning)
            turn = _turn(messages)
            before = turn.get("reasoning_content")
            turn["reasoning_content"] = f"{before}\n{text}" if before else text
        case other:
            hint = "send messages, and calls of functions and custom tools with their outputs"
            raise UnsupportedParameter(f"{at}.type {str(other)[:64]!r}", hint)


def _add_call(messages: list[dict[str, Any]], call_id: str, call: dict[str, Any]) -> None:
    turn = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    turn = turn or _turn(messages)
    turn.setdefault("tool_calls", []).append({"id": call_id} | call)


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """A new message of the assistant, or the last one if it has only reasoning so far."""
    last = messages[-1] if messages else {}
    if "reasoning_content" not in last or last["content"] is not None or "tool_calls" in last:
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _chat_message(message: InputMessage, at: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    takes_images = role == "user"
    return {"role": role, "content": _content(message.content, f"{at}.content", takes_images)}


def _content(
    content: str | list[InputPart], at: str, takes_images: bool = True
) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    return content_of(
        [
            _image_of(part, f"{at}[{i}]")
            if part.type == "input_image" and takes_images
            else _text_of(part, f"{at}[{i}]")
            for i, part in enumerate(content)
        ]
    )


def _image_of(part: InputPart, at: str) -> ContentPart:
    if part.file_id is not None:
        raise UnsupportedParameter(f"{at}.file_id", "send the image as a data: URL in image_url")
    if part.image_url is None:
        raise InvalidRequest(f"{at}.image_url is missing", param=f"{at}.image_url")
    return ContentPart.of_image(f"{at}.image_url", part.image_url, part.detail)


def _text_of(part: InputPart, at: str) -> str:
    if part.type == "refusal":
        return part.refusal or ""
    if part.type not in ("input_text", "output_text", "text"):
        raise UnsupportedParameter(
            f"{at}.type {part.type[:64]!r}",
            "this server supports parts of text and, of users and in results, of images",
        )
    if part.text is None:
        raise InvalidRequest(f"{at}.text is missing", param=f"{at}.text")
    return part.text


def _chat_tool(tool: Item) -> dict[str, Any]:
    if tool["type"] == "custom":
        return {"type": "custom", "custom": _chat_custom(tool)}
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {k: tool[k] for k in names if tool.get(k) is not None}}


def _chat_custom(tool: Item) -> Item:
    """In a chat a grammar has an object of its own."""
    custom = {k: tool[k] for k in ("name", "description", "format") if tool.get(k) is not None}
    form = custom.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        grammar = {k: form[k] for k in ("definition", "syntax") if k in form}
        custom["format"] = {"type": "grammar", "grammar": grammar}
    return custom


def _chat_tool_choice(choice: str | Item | None) -> object:
    if isinstance(choice, dict) and choice.get("type") in _SERVED_TOOLS:
        return _named(choice)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _chat_allowed_tools(choice)
    if isinstance(choice, dict):
        kind = str(choice.get("type"))[:64]
        raise UnsupportedParameter(f"tool_choice.type {kind!r}", "name a function or custom tool")
    return choice


def _named(tool: Item) -> Item:
    """A tool by its type and name, as a chat has it."""
    kind = tool.get("type")
    what = "custom" if kind == "custom" else "function"
    return {"type": kind, what: {"name": tool.get("name")}}


def _chat_allowed_tools(choice: Item) -> Item:
    tools = choice.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        param = "tool_choice.tools"
        raise InvalidRequest(f"{param} must be a list of tools, by type and name", param=param)
    allowed = {"mode": choice.get("mode"), "tools": list(map(_named, tools))}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _chat_format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return form
    names = ("name", "description", "schema", "strict")
    schema = {name: form[name] for name in names if form.get(name) is not None}
    return {"type": "json_schema", "json_schema": schema}
