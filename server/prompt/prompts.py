"""The prompts of a request: rendered with the chat template, as token ids that fit the model."""

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.scheduler.types import Insert
from penstock.server.errors import InvalidRequest, UnsupportedParameter
from penstock.server.media.reader import not_supported
from penstock.server.output.reasoning import ReasoningState, format_of_template, reasoning_state
from penstock.server.prompt import limits
from penstock.server.prompt.model import ServedModel
from penstock.server.prompt.off_loop import INLINE_CHARS, off_loop
from penstock.server.prompt.timed_template import TemplateTooSlow, at_most
from penstock.server.prompt.tokenizer import ChatTemplate, IsolatedTemplate, PromptEncoder
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.invalid_fields import report_unused
from penstock.server.protocol.openai import CompletionRequest
from penstock.server.tools.chat_format import ChatFormat
from penstock.server.tools.prompting import (
    Message,
    calls_as_text,
    with_instructions,
    with_short_ids,
    with_string_arguments,
)

# Variables that the server itself sets.
_OWN_VARIABLES = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
)

AnyTemplate = ChatTemplate | IsolatedTemplate
# Each waits for a process. Few, so that slow templates leave the other cores free.
_ISOLATED_TEMPLATES = ThreadPoolExecutor(max_workers=2, thread_name_prefix="template")
# A short conversation takes a hundredth of it. Beyond it, the template is rendered in a process.
_MAX_S_ON_LOOP = 0.02
# A thread shares the interpreter with the event loop, which then answers more slowly.
_MAX_S_IN_THREAD = 0.25

# Appended to a message that is to be continued, to find its end again: the message's own text may
# occur in what the template writes after it. A template that strips the final space would strip
# those of the message too.
_OPEN_END = "CONTINUE_FINAL_MESSAGE_TAG "

# The names of the switch in templates of models that can do both.
_THINKING_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """text: as rendered. begun: the part of the answer that is in the prompt already. inserts: see
    `Request`."""

    text: str
    token_ids: tuple[int, ...]
    begun: str
    inserts: tuple[Insert, ...] = ()


async def chat_prompt(
    fields: ChatCompletionRequest, model: ServedModel, *, only_counts: bool = False
) -> ChatPrompt:
    """Renders and tokenizes, in threads unless that is quick. only_counts: whether the context need
    not hold it. Raises InvalidRequest."""
    encoder = model.encoder
    if fields.images and model.images is None:
        raise not_supported(fields.images[0])
    if fields.mm_processor_kwargs and model.images is None:
        raise UnsupportedParameter("mm_processor_kwargs", "this model takes no images")
    text, begun = await _rendered_chat(fields, encoder)
    encode = partial(encoder.encode_prompt, add_special_tokens=bool(fields.add_special_tokens))
    if fields.images:
        token_ids, inserts = await _with_images(fields, model, text, encode)
        return ChatPrompt(text=text, token_ids=token_ids, begun=begun, inserts=inserts)
    if not (only_counts and limits.is_counted(text)):
        if fields.truncate_prompt_tokens is None:
            limits.check_could_fit(model, "messages", num_chars=len(text))
        encode = partial(
            limits.tokenized, encode=encode, fields=fields, model=model, param="messages"
        )
    token_ids = await off_loop(encode, text, len(text))
    return ChatPrompt(text=text, token_ids=token_ids, begun=begun)


async def _with_images(
    fields: ChatCompletionRequest,
    model: ServedModel,
    text: str,
    encode: Callable[[str], tuple[int, ...]],
) -> tuple[tuple[int, ...], tuple[Insert, ...]]:
    """The ids of a conversation with images, and where their rows are. Raises InvalidRequest."""
    assert model.images
    if fields.truncate_prompt_tokens is not None:
        hint = "a prompt with images cannot be cut; leave it out"
        raise UnsupportedParameter("truncate_prompt_tokens", hint)
    limits.check_could_fit(model, "messages", num_chars=len(text))
    own_options = fields.mm_processor_kwargs
    decoded = await model.images.read(fields.images, model.info, own_options)
    make = partial(model.images.with_rows, encode=encode, images=decoded, info=model.info)
    return await off_loop(make, text, len(text))


async def _rendered_chat(fields: ChatCompletionRequest, encoder: PromptEncoder) -> tuple[str, str]:
    template = encoder.chat_template(fields.chat_template, has_tools=bool(fields.usable_tools))
    if isinstance(template, ChatTemplate):
        max_s = _MAX_S_ON_LOOP if fields.num_bytes <= INLINE_CHARS else _MAX_S_IN_THREAD
        try:
            render_here = partial(render_chat, template=template, max_s=max_s)
            return await off_loop(render_here, fields, fields.num_bytes)
        except TemplateTooSlow:
            template = template.isolated
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_ISOLATED_TEMPLATES, render_chat, fields, template)


def render_chat(
    fields: ChatCompletionRequest, template: AnyTemplate, max_s: float = math.inf
) -> tuple[str, str]:
    """The text, and the part of the answer that it ends with. max_s: of the CPU, for a template
    that runs in this process. Raises InvalidRequest and TemplateTooSlow."""
    variables = _variables(fields, template)
    messages = _messages(fields, template)
    if fields.usable_tools and template.knows("tools"):
        variables["tools"] = [tool.for_template() for tool in fields.usable_tools]
    variables["add_generation_prompt"] = fields.adds_generation_prompt
    with at_most(max_s):
        if not fields.continue_final_message:
            return _rendered(template, messages, variables), ""
        text = _rendered(template, _marked(messages), variables)
    begun = messages[-1]["content"]
    return _left_open(text, begun), begun


def _messages(fields: ChatCompletionRequest, template: AnyTemplate) -> list[Message]:
    messages: list[Message] = list(fields.for_template)
    if "tool_calls" not in template.source:
        messages = calls_as_text(messages)
    elif "length 9" in template.source:  # from its error message about ids
        messages = with_short_ids(messages)
    if fields.usable_tools and not template.knows("tools"):
        messages = with_instructions(messages, fields.call_rules.functions)
    return messages


def _variables(fields: ChatCompletionRequest, template: AnyTemplate) -> dict[str, Any]:
    given = fields.chat_template_kwargs or {}
    for name in given:
        param = f"chat_template_kwargs.{name}"
        if name in _OWN_VARIABLES:
            message = f"{param} is set by the server; use the field {name} of the request"
            raise InvalidRequest(message, param=param)
        if not template.knows(name):
            report_unused(param, "this model's chat template does not use it")
    if fields.documents and template.knows("documents"):
        given = {"documents": fields.documents} | given
    elif fields.documents:
        report_unused("documents", "this model's chat template does not use them")
    return _reasoning_variables(fields, template) | given


def _reasoning_variables(fields: ChatCompletionRequest, template: AnyTemplate) -> dict[str, Any]:
    """How much to reason and to say, for templates that have a variable for it. A degree is a hint;
    "none" must be obeyed."""
    effort = fields.reasoning_effort
    wanted: dict[str, Any] = {"reasoning_effort": effort, "verbosity": fields.verbosity}
    if effort is not None:
        wanted |= dict.fromkeys(_THINKING_SWITCHES, effort != "none")
    known = {k: v for k, v in wanted.items() if v is not None and template.knows(k)}
    can_obey = known.keys() & {"reasoning_effort", *_THINKING_SWITCHES}
    if effort == "none" and format_of_template(template.source) and not can_obey:
        hint = "this model's chat template cannot turn reasoning off; leave it out"
        raise UnsupportedParameter("reasoning_effort 'none'", hint)
    return known


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
    """A rendered conversation up to the end of its final message, for the model to continue."""
    text, mark, rest = text.rpartition(_OPEN_END.rstrip())
    if not mark or begun.strip() not in text:
        raise InvalidRequest(
            "this model's chat template changes the final message, so that it cannot be "
            "continued; leave out continue_final_message",
            param="continue_final_message",
        )
    return text if rest.startswith(" ") else text.rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """token_ids, max_tokens, are_whole, echoes: one entry for each prompt of the request.

    param: the field that they come from. max_tokens: of each prompt's answers. are_whole, echoes:
    see `GenerationRequest`. reasoning: how the answer's reasoning is marked, if it may have any.
    prediction, inserts: see `Request`.
    """

    param: str
    token_ids: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    are_whole: tuple[bool, ...]
    echoes: tuple[str, ...] = ()
    reasoning: ReasoningState | None = None
    prediction: tuple[int, ...] = ()
    inserts: tuple[Insert, ...] = ()


async def completion_prompts(fields: CompletionRequest, model: ServedModel) -> Prompts:
    """Raises InvalidRequest."""
    given, suffix_chars = fields.prompts, len(fields.suffix or "")
    if fields.truncate_prompt_tokens is None:
        for prompt in given:
            if isinstance(prompt, str):
                limits.check_could_fit(model, "prompt", num_chars=len(prompt) + suffix_chars)
    num_chars = sum(len(prompt) + suffix_chars for prompt in given)  # many ids take their time too
    return await off_loop(partial(_prompts, fields, model), given, num_chars)


def _prompts(
    fields: CompletionRequest, model: ServedModel, given: list[str | list[int]]
) -> Prompts:
    tokenized = _encoded(fields, model, given)
    token_ids, max_tokens = limits.fit(tokenized, fields, model, "prompt")
    pieces = model.encoder.vocabulary.pieces
    are_whole = tuple(not any(i in pieces for i in prompt) for prompt in tokenized)
    return Prompts(
        param="prompt",
        token_ids=token_ids,
        max_tokens=max_tokens,
        are_whole=are_whole,
        echoes=_echoes(fields, token_ids, model) if fields.echo else (),
    )


async def chat_prompts(fields: ChatCompletionRequest, model: ServedModel) -> Prompts:
    """The one prompt of a conversation. Raises InvalidRequest."""
    check_servable(fields, model.chat_format)
    if fields.truncate_prompt_tokens is None:
        num_chars, num_messages = fields.num_content_chars, len(fields.messages)
        limits.check_could_fit(model, "messages", num_chars=num_chars, num_messages=num_messages)
    prompt = await chat_prompt(fields, model)
    token_ids, max_tokens = limits.fit([prompt.token_ids], fields, model, "messages")
    return Prompts(
        param="messages",
        token_ids=token_ids,
        max_tokens=max_tokens,
        are_whole=(not prompt.begun,),
        echoes=(fields.echoed,) if fields.echoed else (),
        reasoning=reasoning_state(model.chat_format.reasoning, prompt.text, prompt.begun),
        prediction=await _prediction(fields.predicted, model),
        inserts=prompt.inserts,
    )


async def _prediction(text: str, model: ServedModel) -> tuple[int, ...]:
    """Raises InvalidRequest for one that no answer can be."""
    if not text:
        return ()
    limits.check_could_fit(model, "prediction", num_chars=len(text))
    encode = partial(model.encoder.encode, add_special_tokens=False)
    return await off_loop(encode, text, len(text))


def check_servable(fields: ChatCompletionRequest, form: ChatFormat) -> None:
    """Raises InvalidRequest for fields that this server's flags do not allow."""
    if fields.chat_template is not None and not form.trusts_templates:
        hint = "start the server with --trust-request-chat-template, or leave it out"
        raise UnsupportedParameter("chat_template", hint)
    if fields.usable_tools and not fields.call_rules.must_call and form.tools is None:
        raise InvalidRequest(
            'tool_choice "auto" requires a parser of tool calls, and this server was started with '
            '--tool-call-parser none; use tool_choice "required", or name a function',
            param="tool_choice",
        )


def _encoded(
    fields: CompletionRequest, model: ServedModel, prompts: list[str | list[int]]
) -> list[tuple[int, ...]]:
    """Raises UnsupportedParameter for a suffix if the model cannot fill in the middle."""
    encoder, adds_special = model.encoder, fields.add_special_tokens is not False
    if not fields.suffix:
        encode = partial(encoder.encode_prompt, add_special_tokens=adds_special)
        named = (("prompt", prompt) for prompt in prompts)
        return limits.tokenized_together(named, encode, fields, model)
    for text in (*prompts, fields.suffix):
        limits.check_does_not_overflow(text, model, "prompt")
    prefixes = [prompt for prompt in prompts if isinstance(prompt, str)]  # a suffix needs text
    together = encoder.encode_infill(prefixes, fields.suffix, add_special_tokens=adds_special)
    limits.check_together(sum(map(len, together)), len(together), "prompt")
    return together


def _echoes(
    fields: CompletionRequest, token_ids: tuple[tuple[int, ...], ...], model: ServedModel
) -> tuple[str, ...]:
    """Each prompt as the client sent it, or, if that was ids or was truncated, its ids' text, with
    its special tokens."""
    return tuple(
        prompt
        if isinstance(prompt, str) and fields.truncate_prompt_tokens is None
        else model.encoder.vocabulary.text_of(ids, shows_special=True)
        for prompt, ids in zip(fields.prompts, token_ids, strict=True)
    )
