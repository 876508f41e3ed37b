"""The HTTP request that the current task serves: its id and its trace."""

from contextvars import ContextVar

# The middleware sets both. The task of an HTTP request begins with an empty context of its own.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
# The headers of W3C Trace Context: the client's trace and the span within it.
trace_headers: ContextVar[dict[str, str] | None] = ContextVar("trace_headers", default=None)
