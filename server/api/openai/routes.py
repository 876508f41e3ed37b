"""The endpoints, one short function each."""

import asyncio
import gzip
import time
from datetime import UTC, datetime
from typing import TypeVar

from fastapi import APIRouter, Request
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, gzip_accepted
from starlette.responses import Response

from penstock.server.api.common import (
    body_of,
    check_model,
    json_response,
    service_of,
    tenant_who_asks,
    unless_gone,
)
from penstock.server.api.openai.writer import (
    ChatReply,
    ChunkWriter,
    CompletionReply,
    Envelope,
    Reply,
    TokenExtras,
    plain_body,
)
from penstock.server.http.sse import EventStream
from penstock.server.observability.version import version
from penstock.server.output.best_of import likeliest
from penstock.server.output.generation import Generation, collected
from penstock.server.output.logprobs import PositionLogprobs, by_position
from penstock.server.prompt.generation_request import Ask, ask_chat, ask_completion
from penstock.server.protocol.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
)
from penstock.server.service import Service

router = APIRouter()

# Of tokens whose logprobs an answer tells: more are written in a thread.
_MAX_TOLD_ON_LOOP = 1000

Fields = TypeVar("Fields", bound=GenerationFields)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    service, arrival_s = service_of(request), time.monotonic()
    fields = await _parse(request, CompletionRequest)
    tenant = tenant_who_asks(request)

    async def answer() -> Response:
        ask = await ask_completion(fields, service.model, tenant=tenant, arrival_s=arrival_s)
        extras = _extras(fields, ask)
        reply = CompletionReply(service.model.encoder.vocabulary, fields.num_logprobs, extras)
        return await _answer(service, fields, ask, reply)

    return await unless_gone(request, answer())


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    service, arrival_s = service_of(request), time.monotonic()
    fields = await _parse(request, ChatCompletionRequest)
    tenant = tenant_who_asks(request)

    async def answer() -> Response:
        ask = await ask_chat(fields, service.model, tenant=tenant, arrival_s=arrival_s)
        extras = _extras(fields, ask)
        reply = ChatReply(service.model.encoder.vocabulary, fields.num_logprobs, extras)
        return await _answer(service, fields, ask, reply)

    return await unless_gone(request, answer())


@router.get("/v1/models")
async def models(request: Request) -> Response:
    service = service_of(request)
    names = service.model.names
    cards = [_model_card(service, name) for name in names]
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}  # Anthropic's fields
    return json_response({"object": "list", "data": cards, **page})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    service = service_of(request)
    check_model(service, name)
    return json_response(_model_card(service, name))


@router.get("/health")
async def health(request: Request) -> Response:
    """Alive: whether a restart would help."""
    service_of(request).check_health()
    return json_response({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Whether traffic should come."""
    service_of(request).check_serving()
    return json_response({"status": "ready"})


@router.get("/version")
async def show_version() -> Response:
    return json_response({"version": version()})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    text = service_of(request).metrics.text()
    headers = {"content-type": CONTENT_TYPE_PLAIN_0_0_4, "vary": "accept-encoding"}
    if gzip_accepted(request.headers.get("accept-encoding", "")):
        # A tenth of the bytes at the lowest level; beside the event loop, which streams need.
        text = await asyncio.to_thread(gzip.compress, text, 1)
        headers["content-encoding"] = "gzip"
    return Response(text, headers=headers)


async def _answer(service: Service, fields: GenerationFields, ask: Ask, reply: Reply) -> Response:
    """Submits; then a stream, which sends by itself, or the whole body."""
    envelope = Envelope(ask.id, service.model.name, service.fingerprint)
    generation = service.generate(ask)
    if fields.stream:
        running_usage = generation.usage if fields.wants_running_usage else None
        writer = ChunkWriter(
            envelope, reply, wants_usage=fields.wants_usage, running_usage=running_usage
        )
        interval_s = service.config.server.sse_ping_interval_s
        return EventStream(generation, writer, ping_interval_s=interval_s)
    try:
        pieces = await collected(generation)
    finally:
        generation.close()
    n = fields.n or 1
    if fields.num_sampled > n:
        pieces = likeliest(pieces, fields.num_sampled, n)

    def body() -> bytes:
        prompts = _prompt_logprobs(service, fields, generation)
        return plain_body(envelope, reply, pieces, generation.usage, prompts)

    # What is told of many tokens are a hundred thousand small objects.
    num_told = sum(len(piece.logprobs) + len(piece.echoed) for piece in pieces)
    is_long = fields.num_prompt_logprobs is not None or num_told > _MAX_TOLD_ON_LOOP
    content = await asyncio.to_thread(body) if is_long else body()
    return Response(content, media_type="application/json")


def _prompt_logprobs(
    service: Service, fields: GenerationFields, generation: Generation
) -> list[list[PositionLogprobs]] | None:
    """Each choice's, where they were asked for."""
    num_top = fields.prompt_logprobs
    if num_top is None:
        return None
    vocabulary, n = service.model.encoder.vocabulary, fields.n or 1
    each = []
    for i, request in enumerate(generation.ask.requests):
        told = generation.prompts[i].logprobs
        assert told is not None
        each += [by_position(vocabulary, request.prompt_token_ids, told, num_top)] * n
    return each


def _extras(fields: GenerationFields, ask: Ask) -> TokenExtras:
    prompts = (request.prompt_token_ids for request in ask.requests for _ in range(fields.n or 1))
    return TokenExtras(
        spells_ids=bool(fields.return_tokens_as_token_ids),
        prompt_ids=tuple(prompts) if fields.return_token_ids else None,
    )


async def _parse(request: Request, kind: type[Fields]) -> Fields:
    service = service_of(request)
    fields = kind.parse(await body_of(request))
    check_model(service, fields.model)
    return fields


def _model_card(service: Service, name: str) -> dict[str, object]:
    """Of OpenAI's and of Anthropic's fields, since both ask at the same path."""
    model = service.model
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "penstock",
        "max_model_len": model.info.max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(model.created_s, UTC),
        "lifecycle": "active",
        "max_input_tokens": model.info.max_model_len,
    }
