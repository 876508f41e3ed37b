"""What is known of the HTTP request that is being served, wherever in its task one asks."""

from contextvars import ContextVar

# Both are set at the gate. An HTTP request's task begins with an empty context of its own.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
# The caller's place in a trace, for the headers of W3C's Trace Context.
trace_headers: ContextVar[dict[str, str] | None] = ContextVar("trace_headers", default=None)
