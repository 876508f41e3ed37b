"""A chat request to the prompt that the model gets, by way of its chat template."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from penstock.server.errors import InvalidRequest, UnsupportedParameter
from penstock.server.output.reasoning import format_of_template
from penstock.server.prompt.tokenizer import ChatTemplate, ForeignTemplate, Message, PromptEncoder
from penstock.server.protocol.openai import ChatCompletionRequest
from penstock.server.tools.prompting import (
    calls_as_text,
    template_tools,
    with_instructions,
    with_short_ids,
    with_string_arguments,
)

# What the server itself gives to a template.
_OWN_VARIABLES = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
)

AnyTemplate = ChatTemplate | ForeignTemplate
# So few that templates which take all that they may keep no core from the others.
_FOREIGN_TEMPLATES = ThreadPoolExecutor(max_workers=2, thread_name_prefix="template")
# A conversation this short is encoded in less time than a thread takes to be asked.
_INLINE_BYTES = 2000

# Put behind a message that is to be gone on with, to find its end again: its own text may well be
# in what the template writes behind it. Where the template takes its last space off, it would take
# those of the message off too.
_OPEN_END = "CONTINUE_FINAL_MESSAGE_TAG "

# What templates of models that can do both call the switch.
_THINKING_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """text: as rendered. begun: what of the assistant's answer is in the prompt already."""

    text: str
    token_ids: tuple[int, ...]
    begun: str


async def chat_prompt(fields: ChatCompletionRequest, encoder: PromptEncoder) -> ChatPrompt:
    """`encode_chat` where it delays nobody. Raises InvalidRequest."""
    if fields.chat_template is not None:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_FOREIGN_TEMPLATES, encode_chat, fields, encoder)
    if fields.num_bytes <= _INLINE_BYTES:
        return encode_chat(fields, encoder)
    return await asyncio.to_thread(encode_chat, fields, encoder)


def encode_chat(fields: ChatCompletionRequest, encoder: PromptEncoder) -> ChatPrompt:
    """Raises InvalidRequest. Takes as long as the text is long."""
    template = encoder.chat_template(fields.chat_template)
    variables = _variables(fields, template)
    messages = _messages(fields, template)
    if fields.functions and template.knows("tools"):
        variables["tools"] = template_tools(fields.usable_tools)
    variables["add_generation_prompt"] = fields.adds_generation_prompt
    begun = messages[-1]["content"] if fields.continue_final_message else ""
    if fields.continue_final_message:
        text = _left_open(_rendered(template, _marked(messages), variables), begun)
    else:
        text = _rendered(template, messages, variables)
    adds_special = bool(fields.add_special_tokens)
    token_ids = encoder.encode_rendered(text, add_special_tokens=adds_special)
    return ChatPrompt(text=text, token_ids=token_ids, begun=begun)


def _messages(fields: ChatCompletionRequest, template: AnyTemplate) -> list[Message]:
    messages: list[Message] = list(fields.for_template)
    if "tool_calls" not in template.source:
        messages = calls_as_text(messages)
    elif "length 9" in template.source:  # Mistral's own words for what it refuses
        messages = with_short_ids(messages)
    if fields.functions and not template.knows("tools"):
        messages = with_instructions(messages, fields.functions)
    return messages


def _variables(fields: ChatCompletionRequest, template: AnyTemplate) -> dict[str, Any]:
    given = fields.chat_template_kwargs or {}
    for name, value in given.items():
        param = f"chat_template_kwargs.{name}"
        if name in _OWN_VARIABLES:
            message = f"{param} is the server's to give; use the field {name} of the request"
            raise InvalidRequest(message, param=param)
        if value and not template.knows(name):
            message = f"{param} has no effect: this model's chat template does not know {name!r}"
            raise InvalidRequest(message, param=param)
    return _wishes(fields, template) | given


def _wishes(fields: ChatCompletionRequest, template: AnyTemplate) -> dict[str, Any]:
    """How much to think and to say, for templates that have a variable for it.

    A degree is a wish, which binds no model; not to think at all is an order.
    """
    effort = fields.reasoning_effort
    asked: dict[str, Any] = {"reasoning_effort": effort, "verbosity": fields.verbosity}
    if effort is not None:
        asked |= dict.fromkeys(_THINKING_SWITCHES, effort != "none")
    wishes = {k: v for k, v in asked.items() if v is not None and template.knows(k)}
    can_obey = wishes.keys() & {"reasoning_effort", *_THINKING_SWITCHES}
    if effort == "none" and format_of_template(template.source) and not can_obey:
        hint = "this model's chat template cannot keep it from thinking; leave it out"
        raise UnsupportedParameter("reasoning_effort 'none'", hint)
    return wishes


def _rendered(template: AnyTemplate, messages: list[Message], variables: dict[str, Any]) -> str:
    try:
        return template.render(messages, **variables)
    except InvalidRequest as error:
        has_calls = any("tool_calls" in message for message in messages)
        if not has_calls or not isinstance(error.__cause__, TypeError):
            raise
        # DeepSeek's template joins the arguments to other strings.
        return template.render(with_string_arguments(messages), **variables)


def _marked(messages: list[Message]) -> list[Message]:
    *before, last = messages
    return [*before, {**last, "content": last["content"] + _OPEN_END}]


def _left_open(text: str, begun: str) -> str:
    """A rendered conversation up to where its final message ends, for the model to go on with."""
    text, mark, behind = text.rpartition(_OPEN_END.rstrip())
    if not mark or begun.strip() not in text:
        raise InvalidRequest(
            "this model's chat template changes the final message, so that it cannot be "
            "continued; leave out continue_final_message",
            param="continue_final_message",
        )
    return text if behind.startswith(" ") else text.rstrip()
