"""The stations that every request passes on its way in and out: id, key, state, timing, and the
last handler of errors.

Plain ASGI, because Starlette's own middleware class costs a task and two queues per request.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from contextlib import nullcontext

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.scheduler.errors import PenstockError
from penstock.server.errors import ANTHROPIC_PATH, note_error, reply_to
from penstock.server.http.access import RESPONSE_HEADERS, TENANT, Access, WebPages, claimed_tenant
from penstock.server.observability.metrics import NO_HANDLER, Metrics
from penstock.server.observability.request_log import (
    RequestEntry,
    note_client_gone,
    request_entry,
    request_id,
    trace_headers,
)
from penstock.server.observability.tracing import TRACE_HEADERS
from penstock.server.service import Service

logger = logging.getLogger("penstock")

# In the scope: `send` as the middleware got it. What lies between the middleware and a route looks
# at the start of a response only, so a stream's bodies, one per token, may bypass it.
DIRECT_SEND = "penstock.send"

_MAX_REQUEST_ID_CHARS = 128
# A request with it, in one of the two forms TEXT and JSON, asks for the load in its response.
_LOAD_FORMAT_HEADER = "endpoint-load-metrics-format"
# The paths outside /v1/ that need the model.
_API_PATHS = frozenset(
    (
        *("/classify", "/score", "/rerank", "/v2/rerank", "/v2/embed", "/tokenize", "/detokenize"),
        *("/tokenizer_info", "/invocations"),  # vLLM's, as those before them
        *("/completions", "/chat/completions", "/embeddings", "/models"),  # llama.cpp's
        *("/completion", "/props"),
        "/internal/resume",
    )
)


class Middleware:
    """Wraps the app. It refuses what pages of other sites send, checks the key, finds the tenant,
    and refuses API requests that cannot be served now."""

    def __init__(self, app: ASGIApp, service: Service, access: Access) -> None:
        self._app = app
        self._service = service
        self._access = access
        self._web_pages = WebPages(service.config.server)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        if method == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn sends no body to it
        headers = Headers(scope=scope)
        scope[DIRECT_SEND] = send
        scope[RESPONSE_HEADERS] = {}
        outgoing = _Outgoing(scope, send, self._service, headers)
        request_id.set(outgoing.request_id)
        if not self._service.request_log.is_wanted:
            await self._serve(scope, receive, outgoing, headers)
            return
        entry = RequestEntry(id=outgoing.request_id, method=method, path=scope["path"])
        request_entry.set(entry)
        try:
            await self._serve(scope, receive, outgoing, headers)
        finally:
            entry.route, entry.status = outgoing.route, outgoing.status
            entry.key = scope.get(TENANT) or claimed_tenant(headers)
            self._service.request_log.write(entry)

    async def _serve(
        self, scope: Scope, receive: Receive, outgoing: "_Outgoing", headers: Headers
    ) -> None:
        if self._service.tracer:
            trace_headers.set({name: headers.get(name, "") for name in TRACE_HEADERS})
        path = route_path(scope)
        is_api = path.startswith("/v1/") or path in _API_PATHS
        with self._service.counted() if is_api else nullcontext():
            try:
                self._web_pages.check(scope["method"], headers)
                scope[TENANT] = self._access.tenant(headers, path)
                if is_api:
                    self._service.check_serving()
                await self._app(scope, receive, outgoing)
            except ClientDisconnect:
                note_client_gone()  # while it sent its body: there is no client to answer
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # panics of libraries in Rust are no Exceptions
                await self._answer(error, scope, receive, outgoing)

    async def _answer(
        self, error: BaseException, scope: Scope, receive: Receive, outgoing: "_Outgoing"
    ) -> None:
        if not isinstance(error, PenstockError):
            logger.error("the request failed", exc_info=error)
        note_error(error)
        if outgoing.status is None:
            await reply_to(error).response(route_path(scope))(scope, receive, outgoing)


class _Outgoing:
    """`send`, with the headers that every response has."""

    def __init__(self, scope: Scope, send: Send, service: Service, wanted: Headers) -> None:
        """wanted: the request's headers."""
        self._scope = scope
        self.request_id = _request_id(wanted)
        self._load_format = wanted.get(_LOAD_FORMAT_HEADER)
        self.status: int | None = None
        self._send = send
        self._service = service
        self._received_s = time.monotonic()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = status = message["status"]
            handler = self.route or NO_HANDLER
            self._service.metrics.on_response(handler, self._scope["method"], status)
            raw = list(message.get("headers", ()))  # a copy: all streams share one list
            message = {**message, "headers": raw}
            headers = MutableHeaders(raw=raw)
            headers["x-request-id"] = self.request_id
            if route_path(self._scope).startswith(ANTHROPIC_PATH):
                headers["request-id"] = self.request_id  # the one that its clients read
            headers.update(self._scope[RESPONSE_HEADERS])
            if self._load_format:
                headers.update(_load_report(self._load_format, self._service.metrics))
            headers["x-penstock-state"] = self._service.state.value
            elapsed_ms = (time.monotonic() - self._received_s) * 1e3
            headers["openai-processing-ms"] = str(round(elapsed_ms))
        await self._send(message)

    @property
    def route(self) -> str | None:
        """None if it was refused before, or no route matches."""
        route = self._scope.get("route")
        return route.path if route else None


def _load_report(form: str, metrics: Metrics) -> dict[str, str]:
    """ORCA's header for load balancers, with vLLM's two numbers; none for an unknown form."""
    load = {
        "kv_cache_usage_perc": metrics.stats.kv_usage,  # from 0 to 1, as at vLLM
        "num_requests_waiting": float(metrics.num_waiting),
    }
    match form.upper():
        case "TEXT":
            report = ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())
        case "JSON":
            report = json.dumps({"named_metrics": load})
        case _:
            return {}
    return {"endpoint-load-metrics": f"{form.upper()} {report}"}


def route_path(scope: Scope) -> str:
    """Without the --root-path, which some proxies leave on and some take off."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _request_id(headers: Headers) -> str:
    """The client's own, if it can stand in a log."""
    given = headers.get("x-request-id", "")
    is_fit = given.isascii() and given.isprintable() and 0 < len(given) <= _MAX_REQUEST_ID_CHARS
    return given if is_fit else f"req-{secrets.token_hex(12)}"


class LastResort:
    """Around the whole app. A response that has begun ends with its connection, as it must."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # panics of libraries in Rust are no Exceptions
            logger.error("a request failed", exc_info=error)
            response = reply_to(RuntimeError()).response(scope["path"])
            # The server refuses it if a response has begun. To watch `send` would cost each token.
            with contextlib.suppress(RuntimeError):
                await response(scope, receive, send)
                return
            raise
