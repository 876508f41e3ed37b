"""One streamed response: from body bytes to arrival times, text and usage.

This runs once per token, so it decides how fast a server can be measured: one split, one msgspec
decode of the fields that are measured, one append.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.loadtest.bench.http1 import HttpFailed


class _Delta(msgspec.Struct):
    """Reasoning has two names: DeepSeek's reasoning_content, and reasoning."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Returns the prompt's tokens that its prefix cache had, as far as the server says."""
        details = self.prompt_tokens_details
        return (details.cached_tokens if details else None) or 0


class _Event(msgspec.Struct):
    """The parts of a streamed event that are measured; msgspec skips over all others."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode
# Some servers send an error as the event itself, not under "error".
_BARE_ERRORS = ("error", "exception")


@dataclass(slots=True, eq=False)
class StreamedResponse:
    """Parses one streamed response: a sink of `penstock.loadtest.bench.http1`."""

    arrivals_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    usage: Usage | None = None
    status: int = 0
    error: str | None = None
    is_done: bool = False
    has_empty_end: bool = False  # its last event had a finish reason and no text
    _buffer: bytes = b""

    def on_head(self, status: int, now: float) -> None:
        self.status = status

    def on_body(self, data: bytes, now: float) -> None:
        data = self._buffer + data
        if self.status != 200:
            self._buffer = data
            return
        if b"\r" in data:
            data = data.replace(b"\r", b"")  # of a CRLF: JSON strings have no raw \r
        *events, self._buffer = data.split(b"\n\n")
        for event in events:
            self._on_event(event, now)

    def on_end(self, now: float) -> None:
        """Parses the last event, which may lack the blank line after it."""
        if self.status == 200 and self._buffer.lstrip().startswith(b"data:"):
            event, self._buffer = self._buffer.strip(), b""
            self._on_event(event, now)

    def _on_event(self, event: bytes, now: float) -> None:
        if not event.startswith(b"data:") or b"\n" in event:
            event = self._data_of(event)
            if not event:
                return  # a comment, sent to keep the connection alive
        payload = event[5:]
        try:
            parsed = _decode_event(payload)
        except msgspec.MsgspecError as problem:
            if payload.strip() == b"[DONE]":
                self.is_done = True
                return
            raise HttpFailed(f"the server streamed an invalid event: {problem}") from problem
        if parsed.usage is not None:
            self.usage = parsed.usage
        if parsed.choices:
            self._on_choice(parsed.choices[0], now)
        elif parsed.usage is None:
            self.error = self.error or _bare_error(payload)
        if parsed.error is not None:
            self.error = _error_message(parsed.error)

    def _on_choice(self, choice: _Choice, now: float) -> None:
        delta = choice.delta
        text = choice.text
        if delta is not None:
            text = delta.content or delta.reasoning_content or delta.reasoning
        if choice.finish_reason is not None:
            self.is_done, self.has_empty_end = True, not text
        if text:
            self.texts.append(text)
        elif (
            delta is not None
            and delta.role
            and choice.finish_reason is None
            and not self.arrivals_s
            and delta.tool_calls is None
        ):
            return  # a chat's first event: it names the role and holds no token
        # An event without text is a token too: half a character, or the token that ends the text.
        self.arrivals_s.append(now)

    def problem(self) -> str | None:
        """Why the response is not complete, or None if it is."""
        if self.error is not None:
            return self.error
        if self.status != 200:
            return f"HTTP {self.status}: {error_message_of(self._buffer)}"
        if self.is_done:
            return None if self.arrivals_s else "the response has no tokens"
        rest = self._buffer.strip()
        if not self.arrivals_s and rest.startswith((b"{", b"<")):
            begin = rest[:80].decode(errors="replace")
            return f"the response is not an event stream; it begins with {begin}"
        return "the stream ended without [DONE] or a finish reason"

    def _data_of(self, event: bytes) -> bytes:
        """The data lines of an event joined into one; empty if it has none."""
        lines = event.split(b"\n")
        data = [line[5:] for line in lines if line.startswith(b"data:")]
        if data and any(line.replace(b" ", b"") == b"event:error" for line in lines):
            self.error = error_message_of(b"\n".join(data))
        return b"data:" + b"\n".join(data) if data else b""


def _bare_error(payload: bytes) -> str | None:
    """The message of an event that has neither choices nor usage, if it is an error."""
    parsed = _as_object(payload)
    is_error = parsed.get("object") in _BARE_ERRORS or parsed.get("type") in _BARE_ERRORS
    return _error_message(parsed) if is_error else None


def error_message_of(body: bytes) -> str:
    """The message in an error's body: OpenAI's, else FastAPI's detail, else the first bytes."""
    parsed = _as_object(body)
    if found := parsed.get("error") or parsed.get("detail"):
        return _error_message(found)
    if isinstance(parsed.get("message"), str):
        return _error_message(parsed)
    return body[:200].decode(errors="replace").strip() or "(an empty body)"


def _as_object(text: bytes) -> dict[str, Any]:
    """Returns the fields of a JSON object; of anything else, none."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}


def _error_message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
