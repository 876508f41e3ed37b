"""How the cases write their requests."""

import json
from collections.abc import Callable

MIB = 1 << 20
# The server's limit: with it everything is twice as large as by default.
BODY_BYTES = 32 * MIB
# Of a text, so that what is around it fits too.
TEXT_BYTES = BODY_BYTES - 4096
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, EMBEDDINGS = "/v1/messages", "/v1/embeddings"

# Makes the requests of a case, which are sent at the same time.
Case = Callable[[], list[bytes]]


def http(path: str, body: bytes, *, chunk_bytes: int = 0, extra: str = "") -> bytes:
    """chunk_bytes: of chunked encoding; 0: the body is sent at once, with its length. extra: more
    headers, each with its end of line."""
    length = "Transfer-Encoding: chunked" if chunk_bytes else f"Content-Length: {len(body)}"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"{extra}Connection: close\r\n{length}\r\n\r\n"
    )
    if chunk_bytes:
        chunks = (body[i : i + chunk_bytes] for i in range(0, len(body), chunk_bytes))
        body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    return head.encode() + body


def posts(path: str, **fields: object) -> Case:
    return lambda: [http(path, json.dumps(fields).encode())]


def completion(**fields: object) -> Case:
    return posts(COMPLETIONS, **({"prompt": "Once", "max_tokens": 1} | fields))


def chat(**fields: object) -> Case:
    messages = [{"role": "user", "content": "Hi"}]
    return posts(CHAT, **({"messages": messages, "max_tokens": 1} | fields))


def text(path: str, field: str, pattern: str = "a b ") -> Case:
    """A field of as much text as a body holds."""
    return lambda: [http(path, json.dumps({field: filled(pattern)}).encode())]


def message(pattern: str) -> Case:
    """A chat of one message of as much text as a body holds."""
    return lambda: chat(messages=[{"role": "user", "content": filled(pattern)}])()


def filled(pattern: str, num_bytes: int = TEXT_BYTES) -> str:
    return pattern * (num_bytes // len(json.dumps(pattern)[1:-1]))


def raw(body: Callable[[], bytes], path: str = COMPLETIONS) -> Case:
    """A body that is no proper JSON, or that Python would write otherwise."""
    return lambda: [http(path, body())]


def repeated(path: str, before: str, part: str, after: str, num: int | None = None) -> Case:
    """part: separated by commas; as many as fit into a body if num is None."""

    def make() -> list[bytes]:
        count = num or (TEXT_BYTES - len(before) - len(after)) // (len(part) + 1)
        return [http(path, (before + f"{part}," * (count - 1) + part + after).encode())]

    return make
