"""What the endpoints of every API share: the service, who asks, and the client that hangs up."""

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec
from fastapi import Request
from starlette.responses import Response

from penstock.server.errors import ModelNotFound
from penstock.server.http.middleware import api_key_of, read_body
from penstock.server.http.sse import ClientGone, EventStream, EventWriter, until_hangup
from penstock.server.output.generation import Generation, Piece, collected
from penstock.server.prompt.generation_request import Ask, tenant_of
from penstock.server.service import Service

# nginx's status for a client that has hung up. Nobody receives it; the metrics count it.
_CLIENT_GONE = 499


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def tenant_who_asks(request: Request) -> str:
    return tenant_of(api_key_of(request.headers))


async def body_of(request: Request) -> bytes:
    """Raises BodyTooLarge."""
    return await read_body(request, service_of(request).config.server.max_body_bytes)


def check_model(service: Service, name: str) -> None:
    if name not in service.model.names:
        raise ModelNotFound(name, service.model.name)


async def unless_gone(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """The answer, which is cancelled when the client hangs up. To be used once the body is read."""
    try:
        return await until_hangup(request.receive, answer)
    except ClientGone:
        return Response(status_code=_CLIENT_GONE)


async def whole_answer(service: Service, ask: Ask) -> tuple[Generation, list[Piece]]:
    """Submits, and waits for all choices; when it is cancelled, so are they."""
    generation = service.generate(ask)
    try:
        return generation, await collected(generation)
    finally:
        generation.close()


class Writer(EventWriter, Protocol):
    """One API's answer in the making: its events, and what they add up to."""

    @property
    def body(self) -> dict[str, Any]: ...


async def written(
    service: Service,
    ask: Ask,
    make_writer: Callable[[Generation], Writer],
    *,
    streams: bool,
) -> Response:
    """The answer of an API whose events add up to its body."""
    if streams:
        generation = service.generate(ask)
        interval_s = service.config.server.sse_ping_interval_s
        return EventStream(generation, make_writer(generation), ping_interval_s=interval_s)
    generation, pieces = await whole_answer(service, ask)
    writer = make_writer(generation)
    writer.piece(pieces[0])
    writer.end(generation.usage)
    return json_response(writer.body)


def json_response(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
