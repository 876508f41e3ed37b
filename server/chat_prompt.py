"""A chat request to the prompt that the model gets, by way of its chat template."""

from dataclasses import dataclass
from typing import Any

from server.errors import InvalidRequest
from server.prompt import ChatTemplate, Message, PromptEncoder
from server.protocol import ChatCompletionRequest
from server.tools import (
    calls_as_text,
    for_template,
    told_in_words,
    with_short_ids,
    with_string_arguments,
)

# What the server itself gives to a template.
_OWN_VARIABLES = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """text: as rendered. begun: what of the assistant's answer is in the prompt already."""

    text: str
    token_ids: tuple[int, ...]
    begun: str


def encode_chat(fields: ChatCompletionRequest, encoder: PromptEncoder) -> ChatPrompt:
    """Raises InvalidRequest. Takes as long as the text is long."""
    template = encoder.chat_template(fields.chat_template)
    variables = _variables(fields, template)
    messages = _messages(fields, template)
    if fields.functions and template.knows("tools"):
        variables["tools"] = for_template(fields.usable_tools)
    variables["add_generation_prompt"] = fields.adds_generation_prompt
    text = _rendered(template, messages, variables)
    begun = ""
    if fields.continue_final_message:
        begun = messages[-1]["content"]
        text = _cut_behind(text, begun)
    adds_special = bool(fields.add_special_tokens)
    token_ids = encoder.encode_rendered(text, add_special_tokens=adds_special)
    return ChatPrompt(text=text, token_ids=token_ids, begun=begun)


def _messages(fields: ChatCompletionRequest, template: ChatTemplate) -> list[Message]:
    messages: list[Message] = list(fields.for_template)
    if "tool_calls" not in template.source:
        messages = calls_as_text(messages)
    elif "length 9" in template.source:  # Mistral's own words for what it refuses
        messages = with_short_ids(messages)
    if fields.functions and not template.knows("tools"):
        messages = told_in_words(messages, fields.functions)
    return messages


def _variables(fields: ChatCompletionRequest, template: ChatTemplate) -> dict[str, Any]:
    given = fields.chat_template_kwargs or {}
    for name, value in given.items():
        param = f"chat_template_kwargs.{name}"
        if name in _OWN_VARIABLES:
            message = f"{param} is the server's to give; use the field {name} of the request"
            raise InvalidRequest(message, param=param)
        if value and not template.knows(name):
            message = f"{param} has no effect: this model's chat template does not know {name!r}"
            raise InvalidRequest(message, param=param)
    return dict(given)


def _rendered(template: ChatTemplate, messages: list[Message], variables: dict[str, Any]) -> str:
    try:
        return template.render(messages, **variables)
    except InvalidRequest as error:
        has_calls = any("tool_calls" in message for message in messages)
        if not has_calls or not isinstance(error.__cause__, TypeError):
            raise
        # DeepSeek's template joins the arguments to other strings.
        return template.render(with_string_arguments(messages), **variables)


def _cut_behind(text: str, content: str) -> str:
    """The final message left open, for the model to go on with."""
    start = text.rfind(content.strip())
    if start < 0:
        raise InvalidRequest(
            "this model's chat template changes the final message, so that it cannot be "
            "continued; leave out continue_final_message",
            param="continue_final_message",
        )
    begun = content.lstrip()
    return text[: start + len(begun if text.startswith(begun, start) else content.strip())]
