"""From wire fields to what the engine is asked: ids, sampling parameters, salt."""

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from engine.executor import ModelInfo
from engine.grammar import Grammars
from scheduler.errors import ContextTooLong, PenstockError, PromptTooLong
from scheduler.types import Request, RequestId, SamplingParams
from server.chat_format import MARKUP, AnswerReader, ChatFormat, MakeReader, make_splitter
from server.chat_prompt import ChatPrompt, encode_chat
from server.detokenizer import StopStrings
from server.errors import InvalidRequest
from server.prompt import GenerationDefaults, PromptEncoder
from server.protocol import ChatCompletionRequest, CompletionRequest, GenerationFields
from server.structured import check_grammar
from server.tools import call_grammar, check_servable, make_reader

# OpenAI's default for completions; a chat's is what the context has left.
_COMPLETION_MAX_TOKENS = 16
# A text this short is encoded in less time than a thread takes to be asked.
_INLINE_CHARS = 2000
_SEED_RANGE = 1 << 63

T = TypeVar("T")
Ids = TypeVar("Ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """All that is known of the model once it is loaded. The first name is what answers say."""

    names: tuple[str, ...]
    created_s: int
    info: ModelInfo
    encoder: PromptEncoder
    defaults: GenerationDefaults
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    grammars: Grammars | None = None  # None: they are not checked before the engine sees them

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One HTTP request to the engine: a `Request` for each prompt, `n` answers to each.

    are_whole: for each prompt, whether its answers are texts of their own (see `TextDecoder`).
    echoes: for each prompt, the text that its answers begin with; empty for none.
    min_tokens: a stop string is looked for only behind so many. shows_special: as text, by name.
    make_reader: of what takes each answer apart, where it may have parts. markup: the special
    tokens that it must see, id -> text.
    Choices are numbered prompt by prompt: choice = prompt * n + sample.
    """

    id: str
    requests: tuple[Request, ...]
    are_whole: tuple[bool, ...]
    n: int
    stops: StopStrings | None
    includes_stop: bool
    arrival_s: float
    echoes: tuple[str, ...] = ()
    min_tokens: int = 0
    shows_special: bool = False
    wants_token_ids: bool = False
    make_reader: MakeReader | None = None
    markup: Mapping[int, str] = field(default_factory=dict)


async def ask_completion(
    fields: CompletionRequest, model: ServedModel, *, tenant: str, arrival_s: float
) -> Ask:
    """Raises InvalidRequest."""
    num_chars = sum(len(prompt) for prompt in fields.prompts if isinstance(prompt, str))
    adds_special = fields.add_special_tokens is not False
    encode = partial(model.encoder.encode_all, add_special_tokens=adds_special)
    prompts = await _off_loop(encode, fields.prompts, num_chars)
    pieces = model.encoder.vocabulary.pieces
    are_whole = tuple(not any(i in pieces for i in prompt) for prompt in prompts)
    ask = _ask("cmpl", "prompt", fields, model, prompts, are_whole, tenant, arrival_s)
    ask = await _held_to_grammar(await _with_grammar(ask, fields), fields, model)
    return replace(ask, echoes=_echoes(fields, ask, model)) if fields.echo else ask


async def ask_chat(
    fields: ChatCompletionRequest, model: ServedModel, *, tenant: str, arrival_s: float
) -> Ask:
    """Raises InvalidRequest."""
    check_servable(fields, model.chat_format)
    encode = partial(encode_chat, encoder=model.encoder)
    prompt = await _off_loop(encode, fields, fields.num_chars)
    ids, are_whole = [prompt.token_ids], (not prompt.begun,)
    ask = _ask("chatcmpl", "messages", fields, model, ids, are_whole, tenant, arrival_s)
    ask = await _with_call_grammar(await _with_grammar(ask, fields), fields)
    ask = await _held_to_grammar(ask, fields, model)
    return _with_reader(ask, fields, model, prompt)


async def _with_grammar(ask: Ask, fields: GenerationFields) -> Ask:
    """Held to what response_format or one of its like says."""
    constraint = fields.constraint
    if constraint is None:
        return ask
    grammar = await asyncio.to_thread(constraint.build)
    return _resampled(ask, grammar=grammar)


async def _held_to_grammar(ask: Ask, fields: GenerationFields, model: ServedModel) -> Ask:
    """With its grammar checked, and an end for it: a grammar that is complete ends the answer
    even with ignore_eos, which then puts the end off until nothing else can follow."""
    sampling = ask.requests[0].sampling
    if sampling.grammar is None:
        return ask
    constraint = fields.constraint
    param = constraint.param if constraint else "tools"
    if model.grammars:
        await check_grammar(model.grammars, sampling.grammar, param)
    if not fields.ignore_eos:
        return ask
    stop_token_ids = sampling.stop_token_ids + model.info.eos_token_ids
    return _resampled(ask, stop_token_ids=stop_token_ids, grammar_to_the_end=True)


def _resampled(ask: Ask, **changes: Any) -> Ask:
    requests = (replace(r, sampling=replace(r.sampling, **changes)) for r in ask.requests)
    return replace(ask, requests=tuple(requests))


def _with_reader(
    ask: Ask, fields: ChatCompletionRequest, model: ServedModel, prompt: ChatPrompt
) -> Ask:
    form = model.chat_format
    if ask.requests[0].sampling.grammar is not None:
        form = replace(form, reasoning=None)  # the grammar leaves no room for thoughts
    make = partial(_reader, fields, form, prompt)
    if make() is None:
        return ask
    markup = model.encoder.vocabulary.special_among(MARKUP)
    return replace(ask, make_reader=make, markup=markup)


def _reader(
    fields: ChatCompletionRequest, form: ChatFormat, prompt: ChatPrompt
) -> AnswerReader | None:
    return make_reader(fields, form, make_splitter(form.reasoning, prompt.text, prompt.begun))


async def _with_call_grammar(ask: Ask, fields: ChatCompletionRequest) -> Ask:
    """Held to the calls that must be made, where some must."""
    if not fields.functions:
        return ask
    if ask.requests[0].sampling.grammar is not None:
        raise InvalidRequest(
            "an answer that must follow a grammar or schema leaves no room for calls; leave out "
            'response_format and its like, or say tool_choice "none"',
            param="tools",
        )
    grammar = await asyncio.to_thread(call_grammar, fields) if fields.must_call else None
    return _resampled(ask, grammar=grammar) if grammar else ask


def _echoes(fields: CompletionRequest, ask: Ask, model: ServedModel) -> tuple[str, ...]:
    """Each prompt as it was given, or, where that was ids or has been cut, what its ids say."""
    prompts = zip(fields.prompts, ask.requests, strict=True)
    return tuple(
        prompt
        if isinstance(prompt, str) and fields.truncate_prompt_tokens is None
        else model.encoder.vocabulary.text_of(request.prompt_token_ids)
        for prompt, request in prompts
    )


def tenant_of(api_key: str | None) -> str:
    """What keeps one key's cached prefixes from another's. The key cannot be read from it."""
    return hashlib.sha256(api_key.encode()).hexdigest()[:32] if api_key else ""


async def _off_loop(encode: Callable[[T], Ids], text: T, num_chars: int) -> Ids:
    if num_chars <= _INLINE_CHARS:
        return encode(text)
    return await asyncio.to_thread(encode, text)


def _ask(
    kind: str,
    param: str,
    fields: GenerationFields,
    model: ServedModel,
    prompts: list[tuple[int, ...]],
    are_whole: tuple[bool, ...],
    tenant: str,
    arrival_s: float,
) -> Ask:
    own_id = secrets.token_hex(12)  # the engine's: two clients may send the same request_id
    _check_ids(fields, model.info.vocab_size)
    prompts = [_truncated(prompt, fields, model.info.max_model_len) for prompt in prompts]
    requests = tuple(
        Request(
            id=RequestId(f"{kind}-{own_id}-{i}"),
            prompt_token_ids=_checked_prompt(prompt, model.info.vocab_size, param),
            sampling=_sampling(fields, model, len(prompt), param),
            arrival_s=arrival_s,
            n=fields.num_sampled,
            priority=fields.priority or 0,
            cache_salt=f"{tenant}/{fields.cache_salt}" if fields.cache_salt else tenant,
        )
        for i, prompt in enumerate(prompts)
    )
    return Ask(
        id=f"{kind}-{fields.request_id or own_id}",
        requests=requests,
        are_whole=are_whole,
        n=fields.num_sampled,
        stops=StopStrings(fields.stops) if fields.stops else None,
        includes_stop=bool(fields.include_stop_str_in_output),
        arrival_s=arrival_s,
        min_tokens=fields.min_tokens or 0,
        shows_special=fields.skip_special_tokens is False,
        wants_token_ids=bool(fields.return_token_ids),
    )


def _truncated(prompt: tuple[int, ...], fields: GenerationFields, limit: int) -> tuple[int, ...]:
    """The end of the prompt, where the client would rather have that than a refusal."""
    num_kept = fields.truncate_prompt_tokens
    if num_kept is None:
        return prompt
    if num_kept < 0:
        num_kept = max(1, limit - (fields.asked_max_tokens or 1))
    return prompt[-num_kept:]


def _checked_prompt(prompt: tuple[int, ...], vocab_size: int, param: str) -> tuple[int, ...]:
    if not prompt:
        message = f"{param} is empty; the model needs a token at least to go on from"
        raise InvalidRequest(message, param=param)
    if (highest := max(prompt)) >= vocab_size:
        raise _unknown_id(param, highest, vocab_size)
    return prompt


def _check_ids(fields: GenerationFields, vocab_size: int) -> None:
    names = ("logit_bias", "stop_token_ids", "allowed_token_ids")
    named = {name: getattr(fields, name) for name in names}
    for param, ids in named.items():
        for token_id in ids or ():
            if not 0 <= token_id < vocab_size:
                raise _unknown_id(param, token_id, vocab_size)


def _unknown_id(param: str, token_id: int, vocab_size: int) -> InvalidRequest:
    message = f"{param} has the token id {token_id}; this model's go from 0 to {vocab_size - 1}"
    return InvalidRequest(message, param=param)


def _sampling(
    fields: GenerationFields, model: ServedModel, num_prompt: int, param: str
) -> SamplingParams:
    """The client's values, else those of generation_config.json, else OpenAI's defaults."""
    defaults = model.defaults
    top_k = _first(fields.top_k, defaults.top_k, 0)
    stop_token_ids = tuple(fields.stop_token_ids or ())
    if not fields.ignore_eos:
        stop_token_ids += model.info.eos_token_ids
    return SamplingParams(
        max_tokens=_max_tokens(fields, num_prompt, model.info.max_model_len, param),
        seed=secrets.randbits(63) if fields.seed is None else fields.seed % _SEED_RANGE,
        temperature=_first(fields.temperature, defaults.temperature, 1.0),
        top_k=max(top_k, 0),  # -1 is vLLM's word for all
        top_p=_first(fields.top_p, defaults.top_p, 1.0),
        min_p=fields.min_p or 0.0,
        repetition_penalty=_first(fields.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=tuple((fields.logit_bias or {}).items()),
        num_logprobs=fields.num_logprobs_to_sample,
        stop_token_ids=stop_token_ids,
        min_tokens=fields.min_tokens or 0,
        bad_words=_bad_words(fields, model.encoder),
        allowed_token_ids=_allowed_ids(fields, stop_token_ids),
    )


def _bad_words(fields: GenerationFields, encoder: PromptEncoder) -> tuple[tuple[int, ...], ...]:
    spellings: set[tuple[int, ...]] = set()
    for word in fields.bad_words or ():
        spellings |= encoder.encode_within(word)
    return tuple(sorted(spellings))


def _allowed_ids(fields: GenerationFields, stop_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    allowed = tuple(fields.allowed_token_ids or ())
    if allowed and fields.min_tokens and set(allowed) <= set(stop_token_ids):
        message = "allowed_token_ids has only ids that end the answer, which min_tokens forbids"
        raise InvalidRequest(message, param="allowed_token_ids")
    return allowed


def _first(asked: T | None, configured: T | None, default: T) -> T:
    if asked is not None:
        return asked
    return default if configured is None else configured


def _max_tokens(fields: GenerationFields, num_prompt: int, limit: int, param: str) -> int:
    """A limit that the client did not set is cut to what fits; one that it set must fit."""
    room = limit - num_prompt
    if room < 1:
        raise _too_long(PromptTooLong(num_prompt, limit), param)
    asked = fields.asked_max_tokens
    if asked is None:
        return min(room, _COMPLETION_MAX_TOKENS) if param == "prompt" else room
    if asked > room:
        raise _too_long(ContextTooLong(num_prompt, asked, limit), param)
    return asked


def _too_long(error: PenstockError, param: str) -> InvalidRequest:
    return InvalidRequest(str(error), param=param, code="context_length_exceeded")
