"""The HTTP request that the current task serves: its id, its trace, and its line in the log."""

from contextvars import ContextVar

from penstock.server.observability.request_log import RequestEntry

# The middleware sets all. The task of an HTTP request begins with an empty context of its own.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
# The headers of W3C Trace Context: the client's trace and the span within it.
trace_headers: ContextVar[dict[str, str] | None] = ContextVar("trace_headers", default=None)
# None where the line is not wanted.
request_entry: ContextVar[RequestEntry | None] = ContextVar("request_entry", default=None)


def note_client_gone() -> None:
    """For the log: the client closed its connection before the answer was complete."""
    if entry := request_entry.get():
        entry.is_client_gone = True
