"""The endpoints, one short function each."""

import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from server.ask import Ask, ask_chat, ask_completion, tenant_of
from server.errors import ModelNotFound
from server.gate import bearer_token, read_body
from server.generation import collected
from server.protocol import ChatCompletionRequest, CompletionRequest, GenerationFields
from server.replies import ChatReply, ChunkWriter, CompletionReply, Envelope, Reply, plain_body
from server.service import Service
from server.sse import ClientGone, EventStream, until_hangup
from server.version import version

router = APIRouter()

# nginx's status for a client that has hung up. Nobody receives it; the metrics count it.
_CLIENT_GONE = 499

Fields = TypeVar("Fields", bound=GenerationFields)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    service, arrival_s = _service(request), time.monotonic()
    fields = await _parse(request, CompletionRequest)
    tenant = _tenant(request)

    async def answer() -> Response:
        ask = await ask_completion(fields, service.model, tenant=tenant, arrival_s=arrival_s)
        reply = CompletionReply(service.model.encoder.vocabulary, fields.num_logprobs)
        return await _answer(service, fields, ask, reply)

    return await _unless_gone(request, answer())


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    service, arrival_s = _service(request), time.monotonic()
    fields = await _parse(request, ChatCompletionRequest)
    tenant = _tenant(request)

    async def answer() -> Response:
        ask = await ask_chat(fields, service.model, tenant=tenant, arrival_s=arrival_s)
        reply = ChatReply(service.model.encoder.vocabulary, fields.num_logprobs)
        return await _answer(service, fields, ask, reply)

    return await _unless_gone(request, answer())


@router.get("/v1/models")
async def models(request: Request) -> Response:
    service = _service(request)
    cards = [_model_card(service, name) for name in service.model.names]
    return _json({"object": "list", "data": cards})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    service = _service(request)
    _check_model(service, name)
    return _json(_model_card(service, name))


@router.get("/health")
async def health(request: Request) -> Response:
    """Alive: whether a restart would help."""
    _service(request).check_health()
    return _json({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Whether traffic should come."""
    _service(request).check_serving()
    return _json({"status": "ready"})


@router.get("/version")
async def show_version() -> Response:
    return _json({"version": version()})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    text = _service(request).metrics.text()
    return Response(text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


async def _answer(service: Service, fields: GenerationFields, ask: Ask, reply: Reply) -> Response:
    """Submits; then a stream, which sends by itself, or the whole body."""
    envelope = Envelope(ask.id, service.model.name, service.fingerprint)
    generation = service.generate(ask)
    if fields.stream:
        writer = ChunkWriter(envelope, reply, wants_usage=fields.wants_usage)
        interval_s = service.config.server.sse_ping_interval_s
        return EventStream(generation, writer, ping_interval_s=interval_s)
    try:
        pieces = await collected(generation)
    finally:
        generation.close()
    body = plain_body(envelope, reply, pieces, generation.usage)
    return Response(body, media_type="application/json")


async def _unless_gone(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    try:
        return await until_hangup(request.receive, answer)
    except ClientGone:
        return Response(status_code=_CLIENT_GONE)


async def _parse(request: Request, kind: type[Fields]) -> Fields:
    service = _service(request)
    fields = kind.parse(await read_body(request, service.config.server.max_body_bytes))
    _check_model(service, fields.model)
    return fields


def _check_model(service: Service, name: str) -> None:
    if name not in service.model.names:
        raise ModelNotFound(name, service.model.name)


def _model_card(service: Service, name: str) -> dict[str, object]:
    model = service.model
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "penstock",
        "max_model_len": model.info.max_model_len,
    }


def _tenant(request: Request) -> str:
    return tenant_of(bearer_token(request.headers))


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _json(body: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
