"""One server's chat completions over HTTP, streamed. It knows no terminal and no conversation."""

import contextlib
import http.client
import json
import socket
import ssl
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from penstock.scheduler.errors import PenstockError

Message = dict[str, str]  # role and content

_CONNECT_TIMEOUT_S = 10.0
# Before the first piece of an answer too: a long prompt on a slow machine takes minutes.
_READ_TIMEOUT_S = 600.0
_MAX_BODY_BYTES = 1 << 20  # of an answer that is not a stream
_MAX_LINE_BYTES = 1 << 22  # of a stream; logprobs and long tool calls are far shorter


class ServerUnreachable(PenstockError):
    """Nothing answers at the address, or the connection was lost."""


class StillLoading(PenstockError):
    """The server will be ready by itself; the message is its own."""


class Refused(PenstockError):
    """The server answered with an error; the message is its own."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The content of one event; at the end the reason of the end, and the number of tokens."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    num_tokens: int | None = None


class Answer:
    """One answer and how fast it came. It is made when the request is sent, and grows by pieces."""

    def __init__(self) -> None:
        self.text = ""
        self.is_stopped = False  # by the user
        self._asked_s = time.monotonic()
        self._first_s: float | None = None
        self._last_s = self._asked_s
        self._num_pieces = 0
        self._num_tokens: int | None = None
        self._finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        if piece.num_tokens is not None:
            self._num_tokens = piece.num_tokens
        if piece.finish_reason:
            self._finish_reason = piece.finish_reason
        if piece.text or piece.reasoning:
            self._num_pieces += 1
            self._last_s = time.monotonic()
            self._first_s = self._first_s or self._last_s

    def summary(self) -> str:
        """As "142 tokens, TTFT 21 ms, 85.3 tokens/s"."""
        if self._first_s is None:
            return "stopped before the first token" if self.is_stopped else "an empty answer"
        # A server that is stopped, or an older one, tells no number: most send a token a piece.
        is_counted = self._num_tokens is not None
        num_tokens = self._num_tokens or self._num_pieces
        parts = [
            f"{'' if is_counted else '~'}{num_tokens} tokens",
            f"TTFT {(self._first_s - self._asked_s) * 1e3:.0f} ms",
        ]
        if num_tokens > 1 and self._last_s > self._first_s:
            parts.append(f"{(num_tokens - 1) / (self._last_s - self._first_s):.1f} tokens/s")
        if self.is_stopped:
            parts.append("stopped")
        elif self._finish_reason == "length":
            parts.append("cut off at the limit of tokens")
        return ", ".join(parts)


class ChatClient:
    """One connection at a time, which is closed where an answer is left before its end."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """url: of the server's root, without /v1."""
        self.url = url
        self._parts = urlsplit(url)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def first_model(self) -> str:
        """The first that the server lists. Raises PenstockError."""
        with self._asked("GET", "/v1/models", None) as response:
            try:
                return str(json.loads(response.read(_MAX_BODY_BYTES))["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise Refused(
                    f"{self.url}/v1/models lists no model; name one with --model, or another "
                    "server with --base-url"
                ) from error

    def answer(self, body: dict[str, Any]) -> Generator[Piece]:
        """The pieces of the answer as they come. Raises PenstockError, in the middle too."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        has_ended = False
        with self._asked("POST", "/v1/chat/completions", body) as response:
            for line in self._lines(response):
                data = line.strip().removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if line.startswith(b"data:"):
                    piece = _piece(data)
                    has_ended = has_ended or piece.finish_reason is not None
                    yield piece
        if not has_ended:  # some servers send no [DONE]
            raise ServerUnreachable(f"{self.url} closed the connection in the middle of the answer")

    def _lines(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        """Raises ServerUnreachable for one that does not end."""
        while line := response.readline(_MAX_LINE_BYTES):
            if len(line) == _MAX_LINE_BYTES and not line.endswith(b"\n"):
                raise ServerUnreachable(
                    f"{self.url} sent a line of more than {_MAX_LINE_BYTES} bytes, which is no "
                    "stream of events"
                )
            yield line

    @contextlib.contextmanager
    def _asked(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        has_tls = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if has_tls else http.client.HTTPConnection
        host, port = self._parts.hostname or "", self._parts.port
        connection = kind(host, port, timeout=_CONNECT_TIMEOUT_S)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._parts.path + path, data, self._headers)
            if connection.sock:
                connection.sock.settimeout(_READ_TIMEOUT_S)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise self._error(response)
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnreachable(self._why(error)) from error
        finally:
            connection.close()

    def _error(self, response: http.client.HTTPResponse) -> PenstockError:
        try:
            message = str(json.loads(response.read(_MAX_BODY_BYTES))["error"]["message"])
        except (ValueError, LookupError, TypeError):
            message = f"status {response.status} {response.reason}"
        if response.status in (401, 403):
            return Refused(
                f"{self.url} requires an API key ({message}); give it with --api-key, or in "
                "$PENSTOCK_API_KEY"
            )
        is_unavailable = response.status == http.HTTPStatus.SERVICE_UNAVAILABLE
        if is_unavailable and "loading" in message.lower():  # so say llama.cpp's server and ours
            return StillLoading(message)
        return Refused(message)

    def _why(self, error: Exception) -> str:
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                f"{self.url} has a certificate that this machine does not trust "
                f"({error.verify_message}); name its authority in SSL_CERT_FILE"
            )
        if isinstance(error, ConnectionRefusedError | socket.gaierror):
            return (
                f"no server answers at {self.url} ({error.strerror}); start one with "
                "`penstock serve`, or name another with --base-url"
            )
        return f"{self.url}: {str(error) or type(error).__name__}"


def _piece(data: bytes) -> Piece:
    """Raises Refused for an event that is an error, or none of this API."""
    try:
        event = json.loads(data)
        if "error" in event:
            raise Refused(str(event["error"]["message"]))
        usage, choices = event.get("usage"), event.get("choices") or [{}]
        delta = choices[0].get("delta") or {}
        return Piece(
            text=delta.get("content") or "",
            reasoning=delta.get("reasoning_content") or delta.get("reasoning") or "",
            finish_reason=choices[0].get("finish_reason"),
            num_tokens=usage["completion_tokens"] if usage else None,
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        text = data[:200].decode("utf-8", "replace")
        raise Refused(f"the server sent an event that is no chat completion: {text}") from error
