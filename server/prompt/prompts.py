"""Renders and tokenizes: the prompts of a request, as token ids that fit the model."""

from dataclasses import dataclass
from functools import partial

from penstock.server.errors import InvalidRequest, UnsupportedParameter
from penstock.server.output.reasoning import ReasoningState, reasoning_state
from penstock.server.prompt import limits
from penstock.server.prompt.chat import chat_prompt
from penstock.server.prompt.model import ServedModel
from penstock.server.prompt.off_loop import off_loop
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.openai import CompletionRequest
from penstock.server.tools.chat_format import ChatFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """token_ids, max_tokens, are_whole, echoes: one entry for each prompt of the request.

    param: the field that they come from. max_tokens: of each prompt's answers. are_whole, echoes:
    see `GenerationRequest`. reasoning: how the answer's reasoning is marked, if it may have any.
    """

    param: str
    token_ids: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    are_whole: tuple[bool, ...]
    echoes: tuple[str, ...] = ()
    reasoning: ReasoningState | None = None


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
    )


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
