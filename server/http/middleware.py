"""What every request passes on its way in and out: id, key, state, size, timing, and the last net.

Plain ASGI, because Starlette's own middleware class costs a task and two queues a request.
"""

import asyncio
import codecs
import hashlib
import hmac
import logging
import secrets
import time
from contextlib import nullcontext

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.scheduler.errors import PenstockError
from penstock.server.api.page import is_of_page
from penstock.server.errors import (
    ANTHROPIC_PATH,
    BodyTooLarge,
    BodyTooSlow,
    InvalidApiKey,
    UnsupportedEncoding,
    reply_to,
)
from penstock.server.http.limits import check_parsable
from penstock.server.observability.metrics import NO_HANDLER
from penstock.server.observability.request_context import request_id, trace_headers
from penstock.server.observability.tracing import TRACE_HEADERS
from penstock.server.service import Service

logger = logging.getLogger("penstock")

# In the scope: `send` as the gate got it. What lies between the gate and an endpoint looks at the
# start of a response only, so a stream's bodies, one a token, may go past it.
DIRECT_SEND = "penstock.send"

# The largest body that is taken by default comes so at 1 Mbit/s.
BODY_TIMEOUT_S = 300.0

_MAX_REQUEST_ID_CHARS = 128
# Asked by what runs the server, which has no key: whether it lives, and whether to send traffic.
_OPEN_PATHS = frozenset({"/health", "/ready"})
# Beside all of /v1: what needs the model.
_API_PATHS = frozenset({"/score", "/tokenize", "/detokenize"})


class Gate:
    """Wraps the app. It asks for a key, and under /v1 lets nobody in who cannot be served."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        # All of one length, so that a comparison tells nothing of a key, not even its length.
        keys = service.config.server.api_keys
        self._key_digests = [_digest(key.encode(errors="surrogateescape")) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn sends no body to it
        headers = Headers(scope=scope)
        scope[DIRECT_SEND] = send
        outgoing = _Outgoing(scope, send, self._service, _request_id(headers))
        request_id.set(outgoing.request_id)
        if self._service.tracer:
            trace_headers.set({name: headers.get(name, "") for name in TRACE_HEADERS})
        path = route_path(scope)
        is_api = path.startswith("/v1/") or path in _API_PATHS
        with self._service.counted() if is_api else nullcontext():
            try:
                if not self._is_open(path):
                    self._check_key(headers)
                if is_api:
                    self._service.check_serving()
                await self._app(scope, receive, outgoing)
            except ClientDisconnect:
                pass  # amid its own body: there is nobody to answer, and nothing to tell
            except Exception as error:
                await self._answer(error, scope, receive, outgoing)

    def _is_open(self, path: str) -> bool:
        return path in _OPEN_PATHS or (self._service.config.server.has_page and is_of_page(path))

    def _check_key(self, headers: Headers) -> None:
        if not self._key_digests:
            return
        key = api_key_of(headers) or ""
        given = _digest(key.encode("latin-1"))  # the bytes that were sent
        # Every one is compared, so that the time does not tell which was right.
        if not sum(hmac.compare_digest(given, digest) for digest in self._key_digests):
            raise InvalidApiKey(is_given=bool(key))

    async def _answer(
        self, error: Exception, scope: Scope, receive: Receive, outgoing: "_Outgoing"
    ) -> None:
        if not isinstance(error, PenstockError):
            logger.error("request %s failed", outgoing.request_id, exc_info=error)
        if not outgoing.has_started:
            await reply_to(error).response(route_path(scope))(scope, receive, outgoing)


class _Outgoing:
    """`send`, with the headers that every response has."""

    def __init__(self, scope: Scope, send: Send, service: Service, request_id: str) -> None:
        self._scope = scope
        self.request_id = request_id
        self.has_started = False
        self._send = send
        self._service = service
        self._received_s = time.monotonic()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_started = True
            self._count(message["status"])
            raw = list(message.get("headers", ()))  # a copy: all streams share one list
            message = {**message, "headers": raw}
            headers = MutableHeaders(raw=raw)
            headers["x-request-id"] = self.request_id
            if route_path(self._scope).startswith(ANTHROPIC_PATH):
                headers["request-id"] = self.request_id  # the one that its clients read
            headers["x-penstock-state"] = self._service.state.value
            elapsed_ms = (time.monotonic() - self._received_s) * 1e3
            headers["openai-processing-ms"] = str(round(elapsed_ms))
        await self._send(message)

    def _count(self, status: int) -> None:
        route = self._scope.get("route")  # none where it was refused before, or there is no such
        handler = route.path if route else NO_HANDLER
        self._service.metrics.on_response(handler, self._scope["method"], status)


def route_path(scope: Scope) -> str:
    """Without the --root-path, which some proxies leave on and some take off."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _request_id(headers: Headers) -> str:
    """The client's own, where it is one that a log can hold."""
    given = headers.get("x-request-id", "")
    is_fit = given.isascii() and given.isprintable() and 0 < len(given) <= _MAX_REQUEST_ID_CHARS
    return given if is_fit else f"req-{secrets.token_hex(12)}"


def api_key_of(headers: Headers) -> str | None:
    """From OpenAI's header, `Authorization: Bearer KEY`, or from Anthropic's, `x-api-key`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return bearer or headers.get("x-api-key") or None


async def read_body(request: Request, limit: int) -> bytes:
    """Raises UnsupportedEncoding, InvalidRequest, BodyTooLarge as soon as that is known, or
    BodyTooSlow."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedEncoding(encoding)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise BodyTooLarge(limit)
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise BodyTooLarge(limit)
                chunks.append(chunk)
    except TimeoutError as error:
        raise BodyTooSlow(BODY_TIMEOUT_S) from error
    body = b"".join(chunks).removeprefix(codecs.BOM_UTF8)
    check_parsable(body)
    return body
