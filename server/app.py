"""The FastAPI app, and the process around it: socket, signals, exit code."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import uvicorn
import uvloop
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from penstock.engine.client import configure_logs, flush_logs
from penstock.scheduler.errors import InvalidConfig
from penstock.server.api import handover, health, llama_cpp, models, page, tokenize, vllm
from penstock.server.api.anthropic import routes as anthropic
from penstock.server.api.docs import openapi
from penstock.server.api.embeddings import routes as embeddings
from penstock.server.api.openai import routes as openai
from penstock.server.api.responses import routes as responses
from penstock.server.api.responses.store import ResponseStore
from penstock.server.config import ServeConfig, ServerConfig
from penstock.server.errors import reply_to_unrouted
from penstock.server.http.access import OPEN_PATHS, Access
from penstock.server.http.body import BodyMemory
from penstock.server.http.certificate import Certificate
from penstock.server.http.connection import REQUEST_LOG, HttpProtocol, backlog
from penstock.server.http.middleware import LastResort, Middleware, route_path
from penstock.server.observability.request_log import request_id
from penstock.server.observability.version import version
from penstock.server.service import EXIT_DRAINED, Service

logger = logging.getLogger("penstock")

# After the last request has ended, connections that are kept alive are given no more than this.
_CLOSE_TIMEOUT_S = 3
_MAX_BACKLOG = 2048
# Between two requests of a connection. Load balancers keep theirs for 60 s: a server that closes
# earlier closes during the next request, which they report as a 502.
_KEEP_ALIVE_S = 75

_ROUTES = (
    *(openai, responses, anthropic, llama_cpp, embeddings, tokenize, handover, models, health),
    *(vllm, openapi),
)


def build_app(service: Service) -> FastAPI:
    """The app. Its lifespan starts the engine in the background, so the port answers at once."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, object]]:
        running = asyncio.create_task(service.run())
        try:
            yield {REQUEST_LOG: service.request_log}
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await service.close()

    app = FastAPI(
        title="Penstock",
        version=version(),
        lifespan=lifespan,
        openapi_url=None,
        root_path=service.config.server.root_path,
    )
    app.state.service = service
    app.state.body_memory = BodyMemory(service.config.server.max_body_bytes)
    app.state.responses = ResponseStore(
        max_count=service.config.server.max_stored_responses,
        max_bytes=service.config.server.max_stored_response_bytes,
    )
    for module in _ROUTES:
        app.include_router(module.router)
    if service.config.server.has_page:
        app.include_router(page.router)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_middleware(Middleware, service=service, access=_access(service.config.server))
    if proxies := list(service.config.server.forwarded_allow_ips):
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=proxies)
    cors = service.config.server.cors
    if cors.allowed_origins:
        app.add_middleware(  # outermost: errors need its headers too
            CORSMiddleware,
            allow_origins=cors.allowed_origins,
            allow_methods=cors.allowed_methods,
            allow_headers=cors.allowed_headers,
            allow_credentials=cors.allow_credentials,
            expose_headers=("x-request-id", "request-id", "openai-processing-ms", "retry-after"),
        )
    return app


def _access(config: ServerConfig) -> Access:
    """The page needs no key: it asks its user for one."""
    if config.has_page:
        return Access(config.api_keys, (*OPEN_PATHS, "/"), page.ASSETS_PREFIX)
    return Access(config.api_keys, OPEN_PATHS, None)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    path = route_path(request.scope)
    assert isinstance(error, HTTPException)
    is_preflight = "access-control-request-method" in request.headers
    return reply_to_unrouted(error, path, is_preflight=is_preflight).response(path)


def serve(config: ServeConfig) -> int:
    """Runs the server to its end; returns the exit code. Raises InvalidConfig for the port and the
    certificate."""
    configure_logs(config.server.log_level, config.server.log_format, request_id.get)
    certfile, keyfile = config.server.ssl_certfile, config.server.ssl_keyfile
    certificate = Certificate(certfile, keyfile) if certfile else None
    _allow_files()
    listener = _listen(config.server)
    bound = replace(config.server, port=listener.getsockname()[1])  # --port 0: any that is free
    config = replace(config, server=bound)
    return uvloop.run(_serve(config, listener, certificate))


async def _serve(
    config: ServeConfig, listener: socket.socket, certificate: Certificate | None
) -> int:
    service = Service(config)
    server = http_server(service, certificate)
    draining: list[asyncio.Task[None]] = []

    def on_signal(number: int) -> None:
        name = signal.Signals(number).name
        if draining:
            logger.warning("%s: a second signal, so the server ends at once", name)
            service.kill()
            flush_logs()
            os._exit(128 + number)
        draining.append(asyncio.create_task(service.drain(name)))

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    serving = asyncio.create_task(server.serve([listener]))
    code = await service.over
    server.should_exit = True
    await serving
    if service.tracer:
        service.tracer.close()
    if code == EXIT_DRAINED and not service.is_loaded:
        flush_logs()
        os._exit(code)  # else Python would wait for the loading thread, perhaps in a long download
    return code


def http_server(service: Service, certificate: Certificate | None = None) -> uvicorn.Server:
    """To be given a listening socket. It ends when `should_exit` is set; signals do not end it."""
    config = uvicorn.Config(
        LastResort(build_app(service)),
        http=HttpProtocol,
        ws="none",
        lifespan="on",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # uvicorn would believe any client of this machine
        log_config=None,
        log_level="error",  # malformed HTTP gets an answer, and no line in the log
        ssl_keyfile=service.config.server.ssl_keyfile,
        ssl_certfile=service.config.server.ssl_certfile,
        backlog=_num_backlog(),
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )
    if certificate:
        config.load()
        assert config.ssl
        certificate.watch(config.ssl)
    return _Server(config)


class _Server(uvicorn.Server):
    """uvicorn, without its own answer to signals, which would close the port before the drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _allow_files() -> None:
    """Raises the limit of open files: each stream needs one, and the default is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems name a limit that they refuse
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _num_backlog() -> int:
    """For the limit of open files that this process has now."""
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_BACKLOG if max_files == resource.RLIM_INFINITY else backlog(max_files)


def _listen(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server(
            (config.host, config.port), family=family, backlog=_num_backlog()
        )
    except OSError as error:
        raise InvalidConfig(
            f"cannot listen on {config.host}:{config.port} ({error.strerror}); "
            "choose another with --port or --host"
        ) from error
