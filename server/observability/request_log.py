"""The facts about an HTTP request while it is served, and its line in the log when it has ended,
with no text of it.

At info with --log-requests, else at debug. What a client chose, such as a path, is escaped.
"""

import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass, field

import msgspec

from penstock.engine.client import log_fields, printable
from penstock.scheduler.types import SamplingParams

logger = logging.getLogger("penstock.requests")

# Probes and scrapes come every few seconds: at info they would hide the rest while they succeed.
_PROBES = frozenset(("/health", "/ping", "/ready", "/metrics"))
_MAX_PATH_CHARS = 200
_KEY_CHARS = 8
# nginx's status for a client that has disconnected before an answer began.
CLIENT_GONE = 499


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """The facts about an HTTP request that are known when it has ended.

    operation: a `gen_ai.operation.name` of the conventions. sampling: None if nothing is sampled.
    tpot_s: the mean of all answers. Times are in time.monotonic(), None for what did not happen; of
    several answers, started_s and first_token_s are the earliest and last_token_s is the latest.
    """

    id: str
    operation: str
    arrival_s: float
    started_s: float | None
    num_prompt_tokens: int
    outcome: str
    sampling: SamplingParams | None = None
    num_choices: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    tpot_s: float | None = None
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


@dataclass(slots=True, kw_only=True)
class RequestEntry:
    """The facts that become known of one HTTP request while it is served.

    route: the path as it is declared, None if no route matched. key: a hash. error: the code, or
    else the type, of the error that the client got. ended: what the engine did, if it was asked.
    """

    id: str
    method: str | None = None
    path: str | None = None
    route: str | None = None
    status: int | None = None
    key: str | None = None
    error: str | None = None
    is_client_gone: bool = False
    ended: EndedRequest | None = None
    received_s: float = field(default_factory=time.monotonic)


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


class RequestLog:
    """Writes the lines of one server."""

    def __init__(self, *, is_at_info: bool) -> None:
        self._level = logging.INFO if is_at_info else logging.DEBUG

    @property
    def is_wanted(self) -> bool:
        """Whether any line would be written."""
        return logger.isEnabledFor(self._level)

    def write(self, entry: RequestEntry) -> None:
        status = entry.status or CLIENT_GONE
        level = logging.DEBUG if entry.route in _PROBES and status == 200 else self._level
        if not logger.isEnabledFor(level):
            return
        path = None if entry.path is None else printable(entry.path[:_MAX_PATH_CHARS])
        # In quotes where it is the client's: what it contains cannot be read as a part of the line.
        target = entry.route or msgspec.json.encode(path).decode()
        message = f"{entry.method} {target} {status}" if path else f"no request {status}"
        values = {
            "request_id": entry.id,
            "method": entry.method,
            "route": entry.route,
            "path": None if entry.route else path,
            "status": status,
            "key": entry.key[:_KEY_CHARS] if entry.key else None,
            **_engine_fields(entry.ended),
            "duration_s": round(time.monotonic() - entry.received_s, 4),
            "error": entry.error,
            "client_gone": entry.is_client_gone or status == CLIENT_GONE,
        }
        logger.log(level, "%s", message, extra=log_fields(in_message=_IN_MESSAGE, **values))


_IN_MESSAGE = frozenset(("method", "route", "path", "status"))


def _engine_fields(ended: EndedRequest | None) -> dict[str, object]:
    if ended is None:
        return {}
    reasons = dict.fromkeys(ended.finish_reasons)
    return {
        "prompt_tokens": ended.num_prompt_tokens,
        "cached_tokens": ended.num_cached_tokens,
        "output_tokens": ended.num_output_tokens,
        "ttft_s": _rounded(ended.ttft_s),
        "tpot_s": _rounded(ended.tpot_s),
        "finish_reason": ",".join(reasons) or None,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 5)
