"""HTTP/1.1 as a load generator needs it: few copies, a time stamp on every arrival, keep-alive.

An arrival costs one callback from the event loop, one pass of httptools, and the sink's own work.
This module knows nothing of SSE or OpenAI.
"""

# Why no library: at 256 streams aiohttp stamps arrivals twice as late, and a request costs it three
# times the CPU time; httpx takes 2.3 times the CPU time per event (measured in LOG.md).

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from penstock.loadtest.command_line import root_url
from penstock.scheduler.errors import PenstockError


class HttpFailed(PenstockError):
    """A request without a complete response; the message says what was received."""


class NoTls(HttpFailed):
    """The TLS handshake failed, and would fail again."""


class _ClosedBeforeResponse(HttpFailed):
    """The connection ended before the first byte of the response; an idle one may be replaced."""


class Sink(Protocol):
    """Receives one response. `now` is time.perf_counter() when the bytes were read."""

    def on_head(self, status: int, now: float) -> None: ...

    def on_body(self, data: bytes, now: float) -> None: ...


class BufferedResponse:
    """A sink that keeps a whole response body."""

    def __init__(self) -> None:
        self.status = 0
        self.data = b""

    def on_head(self, status: int, now: float) -> None:
        self.status = status

    def on_body(self, data: bytes, now: float) -> None:
        self.data += data


class Connection(asyncio.Protocol):
    """One TCP or TLS connection, one exchange at a time."""

    def __init__(self, connected: "set[Connection]") -> None:
        self._connected = connected  # contains this one while it is connected
        # httptools calls the on_... methods below by name.
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0
        self._status = 0
        self._is_delimited = False  # by a length or chunks; else by the connection's end
        self._is_keep_alive = False

    @property
    def is_reusable(self) -> bool:
        return self._is_keep_alive and self._done is None and self._transport is not None

    async def exchange(self, request: bytes, sink: Sink) -> None:
        """Sends one request; returns when its response is complete. Raises HttpFailed."""
        if self._transport is None:
            raise _ClosedBeforeResponse("the server closed the connection")
        self._sink = sink
        self._status, self._is_delimited, self._is_keep_alive = 0, False, False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._done = None

    def close(self) -> None:
        self._connected.discard(self)
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._connected.add(self)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            if not isinstance(cause, PenstockError):
                cause = HttpFailed(f"the response is not HTTP/1.1: {error}")
            self._end(cause)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._connected.discard(self)
        if exc is None and self._status and not self._is_delimited:
            self._end(None)
        elif self._status:
            self._end(HttpFailed("the server closed the connection in the middle of its response"))
        else:
            self._end(_ClosedBeforeResponse("the server closed the connection without a response"))

    # Called by httptools.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._is_delimited = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._sink is not None and self._status >= 200:
            self._sink.on_head(self._status, self._now)

    def on_body(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.on_body(data, self._now)

    def on_message_complete(self) -> None:
        if self._status >= 200:  # 100 Continue comes before the response
            self._is_keep_alive = self._parser.should_keep_alive()
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        self._sink = None
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


class ConnectionPool:
    """Connections to one server; a request takes an idle one or opens another, without limit.

    headers: sent with every request. is_insecure: accept any certificate, even a self-signed one.
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        *,
        is_insecure: bool = False,
    ) -> None:
        # People paste the base URL that OpenAI's clients take, which ends in /v1.
        parts = urlsplit(root_url(base_url))
        self._host, self._path = parts.hostname or "", parts.path
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        if self._ssl and is_insecure:
            self._ssl.check_hostname, self._ssl.verify_mode = False, ssl.CERT_NONE
        self._port = parts.port or (443 if self._ssl else 80)
        self._host_header = parts.netloc.rpartition("@")[2]
        self._headers = dict(headers or {})
        self._idle: list[Connection] = []
        self._connected: set[Connection] = set()

    def encode(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> bytes:
        """A request's bytes. Encoded before the replay, so that sending costs little."""
        head = f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._host_header}\r\n"
        for name, value in {**self._headers, **(headers or {})}.items():
            head += f"{name}: {value}\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode("latin-1") + b"\r\n" + body

    async def request(self, request: bytes, sink: Sink) -> None:
        """One exchange, on a new connection if the server has closed the idle one. Raises
        HttpFailed. Cancelling closes the connection, so that the server aborts the request."""
        while True:
            connection, was_idle = await self._take()
            try:
                await connection.exchange(request, sink)
                return
            except _ClosedBeforeResponse:
                if not was_idle:
                    raise
            finally:
                if connection.is_reusable:
                    self._idle.append(connection)
                else:
                    connection.close()

    async def fetch(self, method: str, path: str, body: bytes = b"") -> BufferedResponse:
        """One exchange, and its whole response. Raises HttpFailed."""
        response = BufferedResponse()
        await self.request(self.encode(method, path, body), response)
        return response

    async def aclose(self) -> None:
        self._idle.clear()
        # After a cancelled connect, uvloop does not call connection_lost on every connection, so
        # none is awaited: one round of the event loop carries out the aborts.
        for connection in list(self._connected):
            connection.close()
        await asyncio.sleep(0)

    async def _take(self) -> tuple[Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection, True
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(self._connected), self._host, self._port, ssl=self._ssl
            )
        except OSError as error:
            where = f"cannot connect to {self._host}:{self._port}"
            kind = NoTls if isinstance(error, ssl.SSLError) else HttpFailed
            raise kind(f"{where}: {_why_not_connected(error)}") from error
        return connection, False


def _why_not_connected(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); give --insecure"
    if isinstance(error, ssl.SSLError):
        return "it does not speak TLS; is its URL http://?"
    return error.strerror or str(error)
