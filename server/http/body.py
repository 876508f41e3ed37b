"""A request's body: read within a size and a time; refused if parsing it would take long.

Nothing else runs while JSON becomes objects: not the event loop, nor a thread, as the parser keeps
the interpreter's lock. So a body with very many values is refused before. Values are counted by the
signs around them, and those within texts do not count.
"""

import asyncio
import codecs
from collections.abc import Iterator

from starlette.requests import Request

from penstock.server.errors import (
    BodyTooLarge,
    BodyTooSlow,
    InvalidRequest,
    TooManyLargeBodies,
    UnsupportedContentType,
    UnsupportedEncoding,
)

# The largest body that is accepted by default arrives within it at 1 Mbit/s.
BODY_TIMEOUT_S = 300.0


# Large bodies that may be on their way at once, each as large as is accepted.
_NUM_LARGEST = 16
# Every body may have so much besides, so that nobody's large ones are in the way of ordinary ones.
_FREE_BYTES = 256 * 1024
_LONG_BODY_BYTES = 1 << 20


class BodyMemory:
    """The memory that bodies may hold together while they are read. Many clients that each send a
    large one, slowly, would fill the machine's memory otherwise."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self._left = _NUM_LARGEST * max_body_bytes

    def take(self, num_bytes: int) -> None:
        """Raises TooManyLargeBodies, and takes nothing then."""
        if num_bytes > self._left:
            raise TooManyLargeBodies
        self._left -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._left += num_bytes


async def read_body(request: Request, memory: BodyMemory) -> bytes:
    """Raises UnsupportedContentType, UnsupportedEncoding, InvalidRequest, BodyTooLarge as soon as
    that is known, TooManyLargeBodies, or BodyTooSlow."""
    limit = memory.max_body_bytes
    content_type = request.headers.get("content-type", "")
    if content_type and not is_json(content_type):
        raise UnsupportedContentType(content_type)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedEncoding(encoding)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise BodyTooLarge(limit)
    chunks, size, counts, num_taken = [], 0, SignCounts(), 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise BodyTooLarge(limit)
                if (num_more := size - _FREE_BYTES - num_taken) > 0:
                    memory.take(num_more)
                    num_taken += num_more
                chunks.append(chunk)
                counts.add(chunk)
        body = b"".join(chunks).removeprefix(codecs.BOM_UTF8)
        if len(body) > _LONG_BODY_BYTES:
            await asyncio.sleep(0)  # that took as long as others can wait, and parsing does again
        await check_parsable(body, counts)
        return body
    except TimeoutError as error:
        raise BodyTooSlow(BODY_TIMEOUT_S) from error
    finally:
        memory.give_back(num_taken)


def is_json(content_type: str) -> bool:
    """Text, forms and uploads, which browsers send for any page without asking first, are not.
    Source: "JSON MIME type" of WHATWG's MIME Sniffing."""
    essence = content_type.partition(";")[0].strip().lower()
    return essence in ("application/json", "text/json") or essence.endswith("+json")


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
        self.by_sign = dict.fromkeys(LIMITS, 0)
        self.num_escapes = 0

    def add(self, chunk: bytes) -> None:
        self.num_escapes += chunk.count(b"\\")
        for sign in LIMITS:
            self.by_sign[sign] += chunk.count(sign)


async def check_parsable(body: bytes, counts: SignCounts) -> None:
    """counts: of the body. Raises InvalidRequest."""
    if counts.num_escapes > MAX_ESCAPES:
        message = (
            f"the body has more than {MAX_ESCAPES} backslashes, so it would take too long to read; "
            "send characters as they are, in UTF-8"
        )
        raise InvalidRequest(message, code="body_too_complex")
    if all(num <= LIMITS[sign] for sign, num in counts.by_sign.items()):
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
