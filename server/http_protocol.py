"""uvicorn's HTTP parser, which answers what is no HTTP as all else here is answered.

It also ends a connection whose head has no end: uvicorn would keep all of it.
"""

import secrets

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from server.errors import ErrorReply, malformed_http

# Of a request's line and headers. Above what is read from the socket at once, which may begin with
# the end of another request.
MAX_HEAD_BYTES = 512 << 10


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    _is_in_head = True
    _num_head_bytes = 0
    _cycles: tuple[RequestResponseCycle, ...] = ()  # those that are not answered yet

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head:
            self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            message = f"the headers are larger than {MAX_HEAD_BYTES} bytes; send fewer"
            self._refuse(malformed_http(431, message, "headers_too_large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._num_head_bytes = 0
        super().on_headers_complete()
        unanswered = (cycle for cycle in self._cycles if not cycle.response_complete)
        self._cycles = (*unanswered, self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._abandon()

    def send_400_response(self, msg: str) -> None:
        message = "this is no HTTP/1.1 request that can be read; check method, path and headers"
        self._refuse(malformed_http(400, message, "invalid_http"))

    def _refuse(self, reply: ErrorReply) -> None:
        """Ends the connection, and whatever is still being answered on it."""
        is_amid_answer = any(c.response_started and not c.response_complete for c in self._cycles)
        self._abandon()
        if not is_amid_answer:
            self._write(reply)
        self.transport.close()

    def _abandon(self) -> None:
        """Tells the app that the client is gone. uvicorn tells only the last pipelined request."""
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _write(self, reply: ErrorReply) -> None:
        headers = {
            "content-type": "application/json",
            "content-length": str(len(reply.body)),
            "connection": "close",
            "x-request-id": f"req-{secrets.token_hex(12)}",
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[reply.status] + lines.encode() + b"\r\n" + reply.body)
