"""From wire fields to what the engine is asked: ids, sampling parameters, salt."""

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from penstock.engine.client import Grammars, ModelInfo
from penstock.scheduler.errors import ContextTooLong, PenstockError, PromptTooLong
from penstock.scheduler.types import Request, RequestId, SamplingParams
from penstock.server.errors import InvalidRequest, UnsupportedParameter
from penstock.server.http.limits import check_could_fit
from penstock.server.output.detokenizer import StopStrings
from penstock.server.output.pooling import Pooler
from penstock.server.output.reasoning import Thoughts, thoughts_of
from penstock.server.prompt.chat import chat_prompt
from penstock.server.prompt.tokenizer import GenerationDefaults, PromptEncoder
from penstock.server.protocol.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
)
from penstock.server.structured.constraint import check_grammar
from penstock.server.structured.reasoning_grammar import (
    BUDGET_FIELD,
    check_budget,
    leaves_room,
    with_thoughts,
)
from penstock.server.tools.chat_format import (
    MARKUP,
    AnswerReader,
    ChatFormat,
    MakeReader,
    make_splitter,
)
from penstock.server.tools.parsers import MARKUP as CALL_MARKUP
from penstock.server.tools.prompting import (
    call_grammar,
    calls_or_answer,
    check_servable,
    make_reader,
)

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
    pooler: Pooler = field(default_factory=Pooler)
    heeds_priority: bool = True  # whether the order in which it serves does

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def max_model_len(self) -> int:
        return self.info.max_model_len

    @property
    def max_prompt_chars(self) -> int:
        """No text that is longer fits: all of it would have to be the longest token there is."""
        return self.info.max_model_len * self.encoder.max_token_chars


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One HTTP request to the engine: a `Request` for each prompt, `n` answers to each.

    are_whole: for each prompt, whether its answers are texts of their own (see `TextDecoder`).
    echoes: for each prompt, the text that its answers begin with; empty for none.
    echoes_logprobs: their logprobs begin with the prompt's too.
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
    echoes_logprobs: bool = False
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
    if fields.truncate_prompt_tokens is None:
        longest = max((len(p) for p in fields.prompts if isinstance(p, str)), default=0)
        check_could_fit(model, "prompt", num_chars=longest)
    encode = partial(_encoded, fields, model.encoder)
    prompts = await off_loop(encode, fields.prompts, num_chars + len(fields.suffix or ""))
    pieces = model.encoder.vocabulary.pieces
    are_whole = tuple(not any(i in pieces for i in prompt) for prompt in prompts)
    ask = _ask("cmpl", "prompt", fields, model, prompts, are_whole, tenant, arrival_s)
    if fields.suffix and model.encoder.infill and not fields.ignore_eos:
        ends = ask.requests[0].sampling.stop_token_ids + model.encoder.infill.end_ids
        ask = _resampled(ask, stop_token_ids=ends)
    ask = await _held_to_grammar(await _with_grammar(ask, fields), fields, model)
    if not fields.echo:
        return ask
    echoes = _echoes(fields, ask, model)
    return replace(ask, echoes=echoes, echoes_logprobs=fields.echoes_logprobs)


def _encoded(
    fields: CompletionRequest, encoder: PromptEncoder, prompts: list[str | list[int]]
) -> list[tuple[int, ...]]:
    """Raises UnsupportedParameter for a suffix that the model cannot heed."""
    adds_special = fields.add_special_tokens is not False
    if not fields.suffix:
        return encoder.encode_all(prompts, add_special_tokens=adds_special)
    prefixes = [prompt for prompt in prompts if isinstance(prompt, str)]  # it goes with no others
    return encoder.encode_infill(prefixes, fields.suffix, add_special_tokens=adds_special)


async def ask_chat(
    fields: ChatCompletionRequest, model: ServedModel, *, tenant: str, arrival_s: float
) -> Ask:
    """Raises InvalidRequest."""
    check_servable(fields, model.chat_format)
    if fields.truncate_prompt_tokens is None:
        num_chars, num_messages = fields.num_content_chars, len(fields.messages)
        check_could_fit(model, "messages", num_chars=num_chars, num_messages=num_messages)
    prompt = await chat_prompt(fields, model.encoder)
    ids, are_whole = [prompt.token_ids], (not prompt.begun,)
    ask = _ask("chatcmpl", "messages", fields, model, ids, are_whole, tenant, arrival_s)
    ask = await _with_call_grammar(await _with_grammar(ask, fields), fields, model)
    thoughts = thoughts_of(model.chat_format.reasoning, prompt.text, prompt.begun)
    ask, thoughts = _with_thoughts(ask, fields, model, thoughts)
    ask = await _held_to_grammar(ask, fields, model)
    return _with_reader(ask, fields, model, thoughts)


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
    param = constraint.param if constraint else _grammar_param(fields)
    if model.grammars:
        await check_grammar(model.grammars, sampling.grammar, param)
    if not fields.ignore_eos:
        return ask
    stop_token_ids = sampling.stop_token_ids + model.info.eos_token_ids
    return _resampled(ask, stop_token_ids=stop_token_ids, grammar_to_the_end=True)


def _grammar_param(fields: GenerationFields) -> str:
    """The field that a grammar comes from which no field spells."""
    must_call = isinstance(fields, ChatCompletionRequest) and fields.must_call
    return "tools" if must_call else BUDGET_FIELD


def _resampled(ask: Ask, **changes: Any) -> Ask:
    requests = (replace(r, sampling=replace(r.sampling, **changes)) for r in ask.requests)
    return replace(ask, requests=tuple(requests))


def _with_thoughts(
    ask: Ask, fields: ChatCompletionRequest, model: ServedModel, thoughts: Thoughts | None
) -> tuple[Ask, Thoughts | None]:
    """With room for thoughts before what a grammar says, and an end for those that cost too much.

    And the thoughts that the answer then may have. Raises UnsupportedParameter.
    """
    grammar, budget = ask.requests[0].sampling.grammar, fields.thinking_budget
    if grammar is None and budget is None:
        return ask, thoughts
    token_ids = model.encoder.ids_of_tokens(thoughts.markers) if thoughts else {}
    check_budget(thoughts, token_ids, budget)
    if not thoughts or thoughts.is_closed or not leaves_room(thoughts, token_ids):
        return ask, thoughts if grammar is None else None
    markup_ids = tuple(model.encoder.vocabulary.special_among(CALL_MARKUP))
    grammar = with_thoughts(grammar, thoughts, token_ids, markup_ids, budget)
    return _resampled(ask, grammar=grammar), thoughts


def _with_reader(
    ask: Ask, fields: ChatCompletionRequest, model: ServedModel, thoughts: Thoughts | None
) -> Ask:
    make = partial(_reader, fields, model.chat_format, thoughts)
    if make() is None:
        return ask
    markup = model.encoder.vocabulary.special_among(MARKUP)
    return replace(ask, make_reader=make, markup=markup)


def _reader(
    fields: ChatCompletionRequest, form: ChatFormat, thoughts: Thoughts | None
) -> AnswerReader | None:
    return make_reader(fields, form, make_splitter(thoughts))


async def _with_call_grammar(ask: Ask, fields: ChatCompletionRequest, model: ServedModel) -> Ask:
    """Held to calls, where some must be made; to calls or to its format, where some may."""
    answer = ask.requests[0].sampling.grammar
    if not fields.functions or not (fields.must_call or answer):
        return ask
    marks = model.encoder.vocabulary.special_among(CALL_MARKUP)
    special = {text: token_id for token_id, text in marks.items()}
    grammar = await asyncio.to_thread(call_grammar, fields, model.chat_format.tools, special)
    if answer and not fields.must_call:
        grammar = calls_or_answer(grammar, answer)
    return _resampled(ask, grammar=grammar)


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


async def off_loop(encode: Callable[[T], Ids], text: T, num_chars: int) -> Ids:
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
    check_priority(fields.priority, model)
    limit, asked = model.info.max_model_len, fields.asked_max_tokens
    most = max(1, limit - (1 if asked is None else asked))
    prompts = [kept_end(prompt, fields.truncate_prompt_tokens, most) for prompt in prompts]
    requests = tuple(
        Request(
            id=RequestId(f"{kind}-{own_id}-{i}"),
            prompt_token_ids=checked_prompt(prompt, model.info.vocab_size, param),
            sampling=_sampling(fields, model, len(prompt), param),
            arrival_s=arrival_s,
            n=fields.num_sampled,
            priority=fields.priority or 0,
            cache_salt=salted(tenant, fields.cache_salt),
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


def check_priority(priority: int | None, model: ServedModel) -> None:
    if priority and not model.heeds_priority:
        hint = "start the server with --scheduling-policy priority, or leave it out"
        raise UnsupportedParameter("priority", hint)


def salted(tenant: str, cache_salt: str | None) -> str:
    """What keeps a prompt's cached prefixes from others: a client can narrow it, not widen."""
    return f"{tenant}/{cache_salt}" if cache_salt else tenant


def kept_end(prompt: tuple[int, ...], num_kept: int | None, most: int) -> tuple[int, ...]:
    """The end of the prompt, where the client would rather have that than a refusal.

    num_kept: its `truncate_prompt_tokens`. most: what -1 stands for.
    """
    if num_kept is None:
        return prompt
    return prompt[-(most if num_kept < 0 else num_kept) :]


def checked_prompt(prompt: tuple[int, ...], vocab_size: int, param: str) -> tuple[int, ...]:
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
        num_prompt_logprobs=fields.num_prompt_logprobs,
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
    room, asked = limit - num_prompt, fields.asked_max_tokens
    has_answer = asked != 0
    if room < has_answer:
        raise too_long(PromptTooLong(num_prompt, limit, has_answer=has_answer), param)
    if asked is None:
        return min(room, _COMPLETION_MAX_TOKENS) if param == "prompt" else room
    if asked > room:
        raise too_long(ContextTooLong(num_prompt, asked, limit), param)
    return asked


def too_long(error: PenstockError, param: str) -> InvalidRequest:
    return InvalidRequest(str(error), param=param, code="context_length_exceeded")
