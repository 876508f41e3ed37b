"""From wire fields to what the engine is asked: ids, sampling parameters, salt."""

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from engine.executor import ModelInfo
from scheduler.errors import ContextTooLong, PenstockError, PromptTooLong
from scheduler.types import Request, RequestId, SamplingParams
from server.detokenizer import StopStrings
from server.errors import InvalidRequest
from server.prompt import GenerationDefaults, Message, PromptEncoder
from server.protocol import ChatCompletionRequest, CompletionRequest, GenerationFields

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

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One HTTP request to the engine: a `Request` for each prompt, `n` answers to each.

    are_whole: for each prompt, whether its answers are texts of their own (see `TextDecoder`).
    Choices are numbered prompt by prompt: choice = prompt * n + sample.
    """

    id: str
    requests: tuple[Request, ...]
    are_whole: tuple[bool, ...]
    n: int
    stops: StopStrings | None
    includes_stop: bool
    arrival_s: float


async def ask_completion(
    fields: CompletionRequest, model: ServedModel, *, tenant: str, arrival_s: float
) -> Ask:
    """Raises InvalidRequest."""
    num_chars = sum(len(prompt) for prompt in fields.prompts if isinstance(prompt, str))
    prompts = await _off_loop(model.encoder.encode_all, fields.prompts, num_chars)
    pieces = model.encoder.vocabulary.pieces
    are_whole = tuple(not any(i in pieces for i in prompt) for prompt in prompts)
    return _ask("cmpl", "prompt", fields, model, prompts, are_whole, tenant, arrival_s)


async def ask_chat(
    fields: ChatCompletionRequest, model: ServedModel, *, tenant: str, arrival_s: float
) -> Ask:
    """Raises InvalidRequest."""
    messages: list[Message] = list(fields.for_template)
    num_chars = sum(len(message["content"]) for message in messages)
    prompt = await _off_loop(model.encoder.encode_chat, messages, num_chars)
    return _ask("chatcmpl", "messages", fields, model, [prompt], (True,), tenant, arrival_s)


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
    ask_id = f"{kind}-{secrets.token_hex(12)}"
    _check_ids(fields, model.info.vocab_size)
    requests = tuple(
        Request(
            id=RequestId(f"{ask_id}-{i}"),
            prompt_token_ids=_checked_prompt(prompt, model.info.vocab_size, param),
            sampling=_sampling(fields, model, len(prompt), param),
            arrival_s=arrival_s,
            n=fields.n or 1,
            priority=fields.priority or 0,
            cache_salt=f"{tenant}/{fields.cache_salt}" if fields.cache_salt else tenant,
        )
        for i, prompt in enumerate(prompts)
    )
    return Ask(
        id=ask_id,
        requests=requests,
        are_whole=are_whole,
        n=fields.n or 1,
        stops=StopStrings(fields.stops) if fields.stops else None,
        includes_stop=bool(fields.include_stop_str_in_output),
        arrival_s=arrival_s,
    )


def _checked_prompt(prompt: tuple[int, ...], vocab_size: int, param: str) -> tuple[int, ...]:
    if not prompt:
        message = f"{param} is empty; the model needs a token at least to go on from"
        raise InvalidRequest(message, param=param)
    if (highest := max(prompt)) >= vocab_size:
        raise _unknown_id(param, highest, vocab_size)
    return prompt


def _check_ids(fields: GenerationFields, vocab_size: int) -> None:
    named = {"logit_bias": fields.logit_bias, "stop_token_ids": fields.stop_token_ids}
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
        num_logprobs=fields.num_logprobs,
        stop_token_ids=stop_token_ids,
    )


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
