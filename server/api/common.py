"""The parts that the routes of every API share: a request that was received, and JSON answers."""

import asyncio
import contextlib
import hmac
import ipaddress
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from fastapi import Request
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive

from penstock.engine.client import uncollected
from penstock.scheduler.config import SchedulerConfig
from penstock.server.errors import InvalidApiKey, InvalidRequest
from penstock.server.http.access import RESPONSE_HEADERS, TENANT
from penstock.server.http.body import BodyMemory, read_body
from penstock.server.numbers import number
from penstock.server.observability.request_log import CLIENT_GONE, note_client_gone, request_id
from penstock.server.prompt.model import ServedModel
from penstock.server.prompt.request_builder import Arrival
from penstock.server.protocol.openai import ParsedRequest
from penstock.server.service import Service

_LONG_BODY_BYTES = 1 << 16
_MOST_LISTED = 16
# The names that gateways use for a request's own targets.
TTFT_HEADER = "x-slo-ttft-ms"
TPOT_HEADER = "x-slo-tpot-ms"
_TARGETS = (TTFT_HEADER, TPOT_HEADER)


Fields = TypeVar("Fields", bound=ParsedRequest)
Result = TypeVar("Result")
Fields_co = TypeVar("Fields_co", bound=ParsedRequest, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received(Generic[Fields_co]):
    """A request that was read, parsed and checked. headers: more for its response, by name."""

    service: Service
    model: ServedModel
    fields: Fields_co
    arrival: Arrival
    headers: dict[str, str]


async def receive(http: Request, parse: Callable[[bytes], Fields]) -> Received[Fields]:
    """parse: raises InvalidRequest for what is wrong with the fields themselves. Raises also what
    `read_body` raises, and ModelNotFound."""
    service, arrival_s = service_of(http), time.monotonic()
    body = await body_of(http)
    fields = without_collection(parse, body)
    if len(body) > _LONG_BODY_BYTES:
        await asyncio.sleep(0)  # it took tens of milliseconds, so others go first now
    headers: dict[str, str] = http.scope[RESPONSE_HEADERS]
    if service.config.server.strict_fields:
        fields.check_no_field_is_ignored()
    elif ignored := fields.ignored_fields:
        headers["x-ignored-fields"] = _listed(ignored)
    return Received(
        service=service,
        model=service.model_named(fields.model),
        fields=fields,
        arrival=_arrival(http, arrival_s, service.config.engine.scheduler),
        headers=headers,
    )


def _listed(names: list[str]) -> str:
    """The value of a header, whatever clients call their fields."""
    shown = [re.sub(r"[^\w.-]", "?", name[:64], flags=re.ASCII) for name in names[:_MOST_LISTED]]
    more = len(names) - _MOST_LISTED
    return ", ".join(shown) + (f", and {more} more" if more > 0 else "")


def _arrival(http: Request, arrival_s: float, config: SchedulerConfig) -> Arrival:
    """A client may ask for slower steps than the server's target, and for faster ones only where
    the server has none: its streams are not to slow the prompts of others more than the operator
    wants. Raises InvalidRequest."""
    for raw, _ in http.scope["headers"]:
        if raw.startswith(b"x-slo-") and (name := raw.decode("latin-1")[:40]) not in _TARGETS:
            message = f"the header {name} is not known; use {' or '.join(_TARGETS)}"
            raise InvalidRequest(message, param=name)
    ttft_s, tpot_s = _seconds(http.headers, TTFT_HEADER), _seconds(http.headers, TPOT_HEADER)
    own_itl_s = tpot_s
    if tpot_s is not None and config.itl_target_s is not None:
        own_itl_s = max(tpot_s, config.itl_target_s)
    return Arrival(
        tenant=tenant_of_request(http),
        client=client_of(http),
        arrival_s=arrival_s,
        http_id=request_id.get() or "",
        ttft_target_s=config.ttft_target_s if ttft_s is None else ttft_s,
        tpot_target_s=config.itl_target_s if tpot_s is None else tpot_s,
        own_itl_target_s=own_itl_s,
    )


def _seconds(headers: Headers, name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    milliseconds = 0.0
    with contextlib.suppress(ValueError):
        milliseconds = number(text)
    if milliseconds <= 0:
        raise InvalidRequest(
            f"the header {name} is {text[:40]!r}; it must be milliseconds, more than 0, such as "
            "250 or 0.5",
            param=name,
        )
    return milliseconds / 1e3


def without_collection(parse: Callable[[bytes], Result], body: bytes) -> Result:
    """A large body becomes ten thousands of objects, none of them garbage: to collect garbage among
    them meanwhile takes longer than to parse them."""
    with uncollected():
        return parse(body)


def service_of(http: Request) -> Service:
    service: Service = http.app.state.service
    return service


def tenant_of_request(http: Request) -> str:
    """As the middleware found it when it checked the key."""
    tenant: str = http.scope[TENANT]
    return tenant


def client_of(http: Request) -> str:
    """Its tenant if the server has keys. Else its address: keys that are not checked can be
    invented, one for each request. So can addresses in a network of IPv6 of one host's own."""
    has_keys = bool(service_of(http).config.server.api_keys)
    address = http.client.host if http.client else ""
    with contextlib.suppress(ValueError):
        if ":" in address and "." not in address:  # with a dot it is one of IPv4
            address = str(ipaddress.IPv6Network((address.partition("%")[0], 64), strict=False))
    return (has_keys and tenant_of_request(http)) or address


async def body_of(http: Request) -> bytes:
    memory: BodyMemory = http.app.state.body_memory
    return await read_body(http, memory)


def check_own_key(http: Request, header: str, key: str) -> None:
    """Checks the key that a route wants besides an API key. Raises InvalidApiKey."""
    given = http.headers.get(header, "")
    if not hmac.compare_digest(given.encode("latin-1"), key.encode(errors="surrogateescape")):
        raise InvalidApiKey(is_given=bool(given), header=f"{header}: KEY")


async def unless_disconnected(
    receive: Receive, answer: Coroutine[Any, Any, Result]
) -> Result | None:
    """The answer; or None if the client disconnects before it is complete, which cancels it. The
    request's body must have been read: of what follows it only the disconnect matters."""
    running = asyncio.ensure_future(answer)
    listening = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((running, listening), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        note_client_gone()
        return None
    finally:
        running.cancel()
        listening.cancel()
        await asyncio.gather(running, listening, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def response_to_nobody() -> Response:
    """Its client has disconnected; the metrics count its status, which is nginx's for that."""
    return Response(status_code=CLIENT_GONE)


def json_response(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
