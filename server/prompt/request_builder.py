"""From checked fields, prompts and answer format to one frozen `GenerationRequest`."""

import secrets
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from penstock.engine.client import new_request_id
from penstock.scheduler.types import Dry, Request, SamplingParams, Xtc
from penstock.server.errors import InvalidRequest
from penstock.server.output.detokenizer import StopStrings
from penstock.server.output.generation import GenerationRequest
from penstock.server.prompt.constraints import AnswerFormat
from penstock.server.prompt.model import ServedModel
from penstock.server.prompt.prompts import Prompts
from penstock.server.prompt.tokenizer import PromptEncoder
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.openai import CompletionRequest, GenerationFields, PromptFields

_SEED_RANGE = 1 << 63

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Whose request it is, when it came, and its targets.

    tenant: whose cache and stored responses it may use. client: with whom it shares what is scarce.
    arrival_s: in time.monotonic(). http_id: its X-Request-Id. Targets are in seconds, its own or
    the server's, None without one: its answers are held against tpot_target_s; own_itl_target_s is
    the request's alone, to which steps are fitted while it runs.
    """

    tenant: str
    arrival_s: float
    http_id: str
    client: str = ""
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    own_itl_target_s: float | None = None

    def request(self, fields: PromptFields, model: ServedModel, **others: Any) -> Request:
        """Makes one for the engine. others: of its prompt."""
        salt = fields.cache_salt
        return Request(
            id=new_request_id(self.http_id),
            arrival_s=self.arrival_s,
            priority=fields.priority or 0,
            tenant=self.client,
            # Requests share cached prefixes under an equal salt; a client can narrow its own.
            cache_salt=f"{self.tenant}/{salt}" if salt else self.tenant,
            adapter=model.adapter_id,
            **others,
        )


def build_generation_request(
    fields: GenerationFields,
    prompts: Prompts,
    answer: AnswerFormat,
    model: ServedModel,
    arrival: Arrival,
) -> GenerationRequest:
    """Raises InvalidRequest for bad_words and allowed_token_ids that the model cannot follow."""
    kind = "chatcmpl" if isinstance(fields, ChatCompletionRequest) else "cmpl"
    sampling = _sampling(fields, answer, model)
    requests = tuple(
        arrival.request(
            fields,
            model,
            prompt_token_ids=token_ids,
            sampling=replace(sampling, max_tokens=max_tokens),
            n=fields.num_sampled,
            ttft_target_s=arrival.ttft_target_s if max_tokens else None,
            itl_target_s=arrival.own_itl_target_s,
            prediction=prompts.prediction,
            inserts=prompts.inserts,
            max_drafts=fields.num_speculative_tokens,
        )
        for token_ids, max_tokens in zip(prompts.token_ids, prompts.max_tokens, strict=True)
    )
    return GenerationRequest(
        id=f"{kind}-{fields.request_id or secrets.token_hex(12)}",
        requests=requests,
        are_whole=prompts.are_whole,
        n=fields.num_sampled,
        stops=StopStrings(fields.stops) if fields.stops else None,
        includes_stop=bool(fields.include_stop_str_in_output),
        arrival_s=arrival.arrival_s,
        tpot_target_s=arrival.tpot_target_s,
        echoes=prompts.echoes,
        echoes_logprobs=isinstance(fields, CompletionRequest) and fields.echoes_logprobs,
        min_tokens=fields.min_tokens or 0,
        shows_special=fields.skip_special_tokens is False,
        wants_token_ids=bool(fields.return_token_ids),
        loop=fields.loop_rule,
        make_reader=answer.make_reader,
        markup=answer.markup,
    )


def _sampling(fields: GenerationFields, answer: AnswerFormat, model: ServedModel) -> SamplingParams:
    """The client's values, else those of generation_config.json, else OpenAI's defaults. max_tokens
    is each prompt's own; all else is computed once for all prompts."""
    defaults = model.defaults
    stop_token_ids = _stop_token_ids(fields, answer, model)
    return SamplingParams(
        max_tokens=0,
        seed=secrets.randbits(63) if fields.seed is None else fields.seed % _SEED_RANGE,
        temperature=_first(fields.temperature, defaults.temperature, 1.0),
        top_k=max(_first(fields.top_k, defaults.top_k, 0), 0),  # -1 is vLLM's word for all
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
        dry=_dry(fields, model.encoder),
        xtc=_xtc(fields),
        # A grammar of any text does not let them stand there, however they are divided.
        bad_words=() if answer.bans_texts else _bad_words(fields, model.encoder),
        allowed_token_ids=_allowed_ids(fields, stop_token_ids),
        grammar=answer.grammar,
        grammar_bytes=answer.grammar_bytes,
        grammar_to_the_end=bool(answer.grammar and fields.ignore_eos),
    )


def _stop_token_ids(
    fields: GenerationFields, answer: AnswerFormat, model: ServedModel
) -> tuple[int, ...]:
    """A grammar that is complete ends the answer even with ignore_eos, which then postpones the
    end until nothing else can follow."""
    stop_token_ids = tuple(fields.stop_token_ids or ())
    if not fields.ignore_eos or answer.grammar:
        stop_token_ids += model.info.eos_token_ids
    infill = model.encoder.infill
    if isinstance(fields, CompletionRequest) and fields.suffix and infill and not fields.ignore_eos:
        stop_token_ids += infill.end_ids
    return stop_token_ids


def _bad_words(fields: GenerationFields, encoder: PromptEncoder) -> tuple[tuple[int, ...], ...]:
    spellings: set[tuple[int, ...]] = set()
    for word in fields.bad_words or ():
        spellings |= encoder.encode_within(word)
    return tuple(sorted(spellings))


def _dry(fields: GenerationFields, encoder: PromptEncoder) -> Dry | None:
    """Absent values are llama.cpp's."""
    last_n = _first(fields.dry_penalty_last_n, None, -1)
    if not fields.dry_multiplier or last_n == 0:
        return None
    breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    if fields.dry_sequence_breakers is not None:
        breakers = tuple(fields.dry_sequence_breakers)
    ids = {i for text in breakers for i in encoder.vocabulary.ids_containing(text)}
    return Dry(
        multiplier=fields.dry_multiplier,
        base=_first(fields.dry_base, None, 1.75),
        allowed_length=_first(fields.dry_allowed_length, None, 2),
        last_n=last_n,
        breaker_ids=tuple(sorted(ids)),
    )


def _xtc(fields: GenerationFields) -> Xtc | None:
    """Above a threshold of a half there is never a second choice."""
    threshold = _first(fields.xtc_threshold, None, 0.1)
    if not fields.xtc_probability or threshold > 0.5:
        return None
    return Xtc(fields.xtc_probability, threshold)


def _allowed_ids(fields: GenerationFields, stop_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    allowed = tuple(fields.allowed_token_ids or ())
    if allowed and fields.min_tokens and set(allowed) <= set(stop_token_ids):
        message = "allowed_token_ids has only ids that end the answer, which min_tokens forbids"
        raise InvalidRequest(message, param="allowed_token_ids")
    return allowed


def _first(requested: T | None, configured: T | None, default: T) -> T:
    if requested is not None:
        return requested
    return default if configured is None else configured
