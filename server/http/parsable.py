"""Which bodies are parsed: those that take no longer than other clients can wait.

Nothing else runs while JSON becomes objects: not the event loop, nor a thread, as the parser keeps
the interpreter's lock. So a body with very many values is refused before. Values are counted by the
signs around them, and those within texts do not count.
"""

import asyncio
from collections.abc import Iterator

from penstock.server.errors import InvalidRequest

# Each limit is 20 to 50 ms of parsing. Long conversations stay below: a message or call is one to
# three objects, and takes a hundred tokens.
LIMITS = {b"{": 1 << 14, b"[": 1 << 14, b":": 1 << 16, b",": 1 << 19}
_CHUNK_BYTES = 1 << 16
# One of texts takes as long to read as ten other characters. With each of its characters written
# so, a text of a million tokens stays below.
MAX_ESCAPES = 1 << 21


class SignCounts:
    """Counts in a body that arrives in chunks. Those in texts count too, which costs little."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(LIMITS, 0)
        self._num_escapes = 0

    def add(self, chunk: bytes) -> None:
        self._num_escapes += chunk.count(b"\\")
        for sign in LIMITS:
            self._counts[sign] += chunk.count(sign)

    @property
    def has_many_escapes(self) -> bool:
        return self._num_escapes > MAX_ESCAPES

    @property
    def are_low(self) -> bool:
        return all(self._counts[sign] <= limit for sign, limit in LIMITS.items())


async def check_parsable(body: bytes, counts: SignCounts) -> None:
    """counts: of the body. Raises InvalidRequest."""
    if counts.has_many_escapes:
        message = (
            f"the body has more than {MAX_ESCAPES} backslashes, so it would take too long to read; "
            "send characters as they are, in UTF-8"
        )
        raise InvalidRequest(message, code="body_too_complex")
    if counts.are_low:
        return
    sign = await asyncio.to_thread(sign_beyond_limit, body)
    if sign is not None:
        message = (
            f"the body has more than {LIMITS[sign]} {sign.decode()!r} outside of its texts, so it "
            "would take too long to read; send fewer messages, fields or items at a time"
        )
        raise InvalidRequest(message, code="body_too_complex")


def sign_beyond_limit(body: bytes) -> bytes | None:
    """The first sign of which there are too many outside of texts. In small steps, so that other
    threads may run."""
    counts = dict.fromkeys(LIMITS, 0)
    for piece in _outside_texts(body):
        for sign, limit in LIMITS.items():
            counts[sign] += piece.count(sign)
            if counts[sign] > limit:
                return sign
    return None


def _outside_texts(body: bytes) -> Iterator[bytes]:
    is_in_text, start = False, 0
    while start < len(body):
        chunk = body[start : start + _CHUNK_BYTES]
        start += len(chunk)
        if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2:  # it ends within an escape
            chunk += body[start : start + 1]
            start += 1
        parts = chunk.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[is_in_text::2])
        is_in_text ^= len(parts) % 2 == 0
