"""uvicorn's HTTP parser, with our error format for bytes that are not HTTP.

It also closes connections whose headers are too large or too slow, and answers with 503 when the
process may soon open no more files: uvicorn would buffer the former without limit, and drop the
latter without a response.
"""

import asyncio
import logging
import resource
import secrets
import time

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from penstock.server.errors import ErrorReply, malformed_http, too_many_connections
from penstock.server.http.access import OPEN_PATHS
from penstock.server.observability.request_log import RequestEntry

logger = logging.getLogger("penstock")

# The request line and headers have no more. It is larger than one read from the socket, which may
# begin with the end of the previous request.
MAX_HEAD_BYTES = 512 << 10
# From the connection, or the request's first byte, to the end of its headers. Longer than load
# balancers keep connections open that they opened in advance.
HEAD_TIMEOUT_S = 75.0
# A client that has read nothing for so long has gone without a word, or keeps its answer in our
# memory. Longer than a stream may be paused by who looks at it.
READ_STALL_S = 600.0
# In the state that the app's lifespan makes: the log of requests.
REQUEST_LOG = "request_log"
# Connections beyond the limit get no more: those that say nothing must not keep a probe out.
SPARE_HEAD_TIMEOUT_S = 1.0
# A connection that has been idle for less may be about to send its next request.
_MIN_IDLE_S = 0.5
_MAKE_ROOM_EVERY_S = 0.1
_WARN_EVERY_S = 60.0


def spare_files(max_files: int) -> int:
    """Left for the server itself, for probes, and for saying no, while connections take all others.
    What arrives at once, `backlog`, is half of them: so it never finds none."""
    return max(64, min(max_files // 8, 4096))


def backlog(max_files: int) -> int:
    """Connections that wait to be accepted; the client's kernel tries again for further ones."""
    return spare_files(max_files) // 2


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    _is_in_head = True
    _num_head_bytes = 0  # or of trailers: of what is read as a whole before it is of use
    _is_new = False  # whether a part of a request has begun or ended in what is read now
    _stall_timer: asyncio.TimerHandle | None = None
    _cycles: tuple[RequestResponseCycle, ...] = ()  # requests that are not answered yet
    _head_timer: asyncio.TimerHandle | None = None
    _max_files: int | None = None  # the limit of open files, if it is nearly reached
    _idle_since_s = 0.0
    # Shared by all connections.
    _warned_s = -_WARN_EVERY_S
    _made_room_s = -_MAKE_ROOM_EVERY_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since_s = time.monotonic()
        max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The kernel assigns the lowest free number.
        number = transport.get_extra_info("socket").fileno()
        num_left = max_files - number
        if max_files != resource.RLIM_INFINITY and num_left <= spare_files(max_files):
            self._max_files = max_files
            self.timeout_keep_alive = 0
            self._warn(max_files)
            self._make_room(spare_files(max_files))
            if num_left <= backlog(max_files):
                self.loop.call_soon(transport.abort)  # else the next could not be accepted
        self._await_head()

    def _make_room(self, num: int) -> None:
        """Closes the connections that have been idle for the longest."""
        now_s = time.monotonic()
        if now_s - HttpProtocol._made_room_s < _MAKE_ROOM_EVERY_S:
            return
        HttpProtocol._made_room_s = now_s
        idle = [
            each
            for each in self.connections
            if isinstance(each, HttpProtocol) and each.is_idle_since(now_s - _MIN_IDLE_S)
        ]
        for each in sorted(idle, key=lambda each: each._idle_since_s)[:num]:
            each.transport.close()

    def is_idle_since(self, time_s: float) -> bool:
        """It serves no request, and none has begun."""
        is_busy = self._num_head_bytes or any(not c.response_complete for c in self._cycles)
        return not is_busy and self._idle_since_s <= time_s

    def _warn(self, max_files: int) -> None:
        now_s = time.monotonic()
        if now_s - HttpProtocol._warned_s >= _WARN_EVERY_S:
            HttpProtocol._warned_s = now_s
            logger.warning(
                "too many connections: new ones get status 503 and idle ones are closed, because "
                "this process may open %d files; allow it %d or more (ulimit -n, nofile)",
                max_files,
                2 * max_files,
            )

    def _await_head(self) -> None:
        if self._head_timer is None:
            is_spare = self._max_files is not None
            timeout_s = SPARE_HEAD_TIMEOUT_S if is_spare else HEAD_TIMEOUT_S
            self._head_timer = self.loop.call_later(timeout_s, self._end_head)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_head(self) -> None:
        self._head_timer = None
        if any(not cycle.response_complete for cycle in self._cycles):
            self._await_head()  # reading is paused until the previous request is answered
            return
        if not self._num_head_bytes:
            self.transport.close()  # it sent nothing
            return
        message = (
            f"the headers did not arrive within {HEAD_TIMEOUT_S:g} s; send them without a pause"
        )
        self._refuse(malformed_http(408, message, "request_timeout"))

    def data_received(self, data: bytes) -> None:
        if self._max_files is not None and not _is_probe(data):
            self._refuse(too_many_connections(self._max_files))
            return
        self._is_new = False
        super().data_received(data)
        if self._is_in_head or not self._is_new:
            self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            message = f"the headers are larger than {MAX_HEAD_BYTES} bytes; send fewer"
            self._refuse(malformed_http(431, message, "headers_too_large"))

    def pause_writing(self) -> None:
        """The client does not read, and what is written for it fills the socket."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()

    def _watch_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._stop_watching()
        self._stall_timer = self.loop.call_later(READ_STALL_S, self._end_stalled, unread)

    def _end_stalled(self, num_unread: int) -> None:
        """num_unread: a while ago."""
        if self.transport.get_write_buffer_size() < num_unread:
            self._watch_reader()
        else:
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers have no reader."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_message_complete(self) -> None:
        self._is_new = True
        self._num_head_bytes = 0
        super().on_message_complete()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = self._is_new = True
        self._await_head()

    def on_headers_complete(self) -> None:
        self._is_in_head, self._is_new = False, True
        self._num_head_bytes = 0
        self._stop_waiting()
        super().on_headers_complete()
        unanswered = (cycle for cycle in self._cycles if not cycle.response_complete)
        self._cycles = (*unanswered, self.cycle)

    def on_response_complete(self) -> None:
        self._idle_since_s = time.monotonic()
        super().on_response_complete()

    def on_body(self, body: bytes) -> None:
        """uvicorn appends to bytes, which copies them all for each of ten thousand tiny chunks."""
        self._is_new = True
        self._num_head_bytes = 0
        if isinstance(self.cycle.body, bytes):
            self.cycle.body = bytearray(self.cycle.body)
        super().on_body(body)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()
        self._stop_watching()
        self._abandon()

    def send_400_response(self, msg: str) -> None:
        message = "this is not a valid HTTP/1.1 request; check method, path and headers"
        self._refuse(malformed_http(400, message, "invalid_http"))

    def _refuse(self, reply: ErrorReply) -> None:
        """Closes the connection, and aborts the requests on it that are not answered yet."""
        has_begun_response = any(
            c.response_started and not c.response_complete for c in self._cycles
        )
        self._abandon()
        if not has_begun_response:
            self._write(reply)
        self.transport.close()

    def _abandon(self) -> None:
        """Signals the disconnect to every pipelined request; uvicorn does to the last only."""
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _write(self, reply: ErrorReply) -> None:
        request_id = f"req-{secrets.token_hex(12)}"
        if log := self.app_state.get(REQUEST_LOG):
            log.write(RequestEntry(id=request_id, status=reply.status, error=reply.name))
        headers = {
            "content-type": "application/json",
            "content-length": str(len(reply.body)),
            "connection": "close",
            "x-request-id": request_id,
        } | dict(reply.headers)
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[reply.status] + lines.encode() + b"\r\n" + reply.body)


def _is_probe(data: bytes) -> bool:
    """Whether a request that begins so asks for a path that an orchestrator asks for, perhaps under
    a --root-path."""
    target = data.partition(b" ")[2].partition(b" ")[0].partition(b"?")[0]
    return target.decode("latin-1").endswith(OPEN_PATHS)
