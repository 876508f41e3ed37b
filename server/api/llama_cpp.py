"""`/completion` and `/props`: llama.cpp's own API, for its clients."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.api.common import Received, json_response, service_of
from penstock.server.api.openai.writer import error_event
from penstock.server.api.pipeline import answer_request
from penstock.server.observability.version import version
from penstock.server.output.delta import LogprobEntry, OutputDelta, Usage
from penstock.server.output.generation import Generation
from penstock.server.output.logprobs import finite
from penstock.server.output.timings import timings
from penstock.server.prompt.model import ServedModel
from penstock.server.prompt.prompts import Prompts, completion_prompts
from penstock.server.protocol.llama_cpp import LlamaCompletionRequest
from penstock.server.protocol.openai import CompletionRequest

router = APIRouter()
_encode = msgspec.json.Encoder().encode


@router.post("/completion")
async def completion(request: Request) -> Response:
    return await answer_request(request, LlamaCompletions())


@router.get("/props")
async def props(request: Request) -> Response:
    """The parts of llama.cpp's answer that its clients read: context, template, slots."""
    service = service_of(request)
    model = service.model
    return json_response(
        {
            "default_generation_settings": {"n_ctx": model.max_model_len},
            "total_slots": service.config.engine.scheduler.max_num_seqs,
            "model_alias": model.name,
            "model_path": service.config.engine.model,
            "chat_template": model.encoder.template_source or "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"penstock {version()}",
        }
    )


class LlamaCompletions:
    """See `penstock.server.api.pipeline.TextApi`."""

    parse = staticmethod(LlamaCompletionRequest.parse)

    async def render(
        self, received: Received[LlamaCompletionRequest]
    ) -> tuple[CompletionRequest, Prompts]:
        fields = received.fields.completion
        return fields, await completion_prompts(fields, received.model)

    def writer(
        self, received: Received[LlamaCompletionRequest], generation: Generation
    ) -> "LlamaWriter":
        return LlamaWriter(received.model, received.fields.completion, generation)


class LlamaWriter:
    """The answers to a request, or the events of each: texts, then one with all that is known."""

    def __init__(
        self, model: ServedModel, fields: CompletionRequest, generation: Generation
    ) -> None:
        self._model = model
        self._fields = fields
        self._generation = generation

    def body(self, deltas: list[OutputDelta], generation: Generation) -> list[bytes]:
        """One answer as an object, several as a list."""
        answers = [self._whole(delta) for delta in deltas]
        return [_encode(answers if len(answers) > 1 else answers[0])]

    def openings(self, num_choices: int) -> bytes:
        return b""

    def delta(self, delta: OutputDelta) -> bytes:
        events = b""
        if delta.text or delta.token_ids:
            events = _event(self._part(delta) | {"stop": False})
        if delta.finish_reason:
            events += _event(self._whole(delta._replace(text="", token_ids=(), logprobs=[])))
        return events

    def end(self, usage: Usage) -> bytes:
        return b""

    def failure(self, error: Exception) -> bytes:
        return error_event(error)

    def _part(self, delta: OutputDelta) -> dict[str, Any]:
        generation = self._generation
        prompt_ids = generation.request.prompt_token_ids[delta.choice // generation.request.n]
        part = {
            "index": delta.choice,
            "content": delta.text,
            "tokens": delta.token_ids,
            "id_slot": -1,
            "tokens_predicted": generation.choices[delta.choice].num_tokens,
            "tokens_evaluated": len(prompt_ids),
        }
        if delta.logprobs:
            part["completion_probabilities"] = [self._probability(e) for e in delta.logprobs]
        return part

    def _whole(self, delta: OutputDelta) -> dict[str, Any]:
        generation = self._generation
        prompt = self._fields.prompts[delta.choice // generation.request.n]
        vocabulary = self._model.encoder.vocabulary
        is_cut = delta.finish_reason == "length"
        is_word = isinstance(delta.ended_by, str) and not is_cut
        ended = "limit" if is_cut else "word" if is_word else "eos"
        return self._part(delta) | {
            "stop": True,
            "model": self._model.name,
            "generation_settings": self._settings(),
            "prompt": prompt if isinstance(prompt, str) else vocabulary.text_of(prompt),
            "has_new_line": "\n" in delta.text,
            "truncated": False,
            "stop_type": ended,
            "stopping_word": delta.ended_by if is_word else "",
            "tokens_cached": generation.choices[delta.choice].num_cached,
            "timings": timings(generation, delta.choice),
        }

    def _settings(self) -> dict[str, Any]:
        sampling = self._generation.request.requests[0].sampling
        return {
            "n_ctx": self._model.max_model_len,
            "n_predict": sampling.max_tokens,
            "seed": sampling.seed,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "n_probs": sampling.num_logprobs or 0,
            "stop": self._fields.stops,
            "ignore_eos": bool(self._fields.ignore_eos),
            "stream": bool(self._fields.stream),
        }

    def _probability(self, entry: LogprobEntry) -> dict[str, Any]:
        top = entry.logprobs.top[: self._fields.num_logprobs]
        best = [self._token(token_id, logprob) for token_id, logprob in top]
        return self._token(entry.token_id, entry.logprobs.logprob) | {"top_logprobs": best}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        name = self._model.encoder.vocabulary.spelling(token_id)
        return {
            "id": token_id,
            "token": name.decode(errors="replace"),
            "bytes": list(name),
            "logprob": finite(logprob),
        }


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + _encode(fields) + b"\n\n"
