"""A request's body: read within a size and a time; refused if parsing it would take long."""

import asyncio
import codecs

from starlette.requests import Request

from penstock.server.errors import (
    BodyTooLarge,
    BodyTooSlow,
    TooManyLargeBodies,
    UnsupportedContentType,
    UnsupportedEncoding,
)
from penstock.server.http.parsable import SignCounts, check_parsable

# The largest body that is accepted by default arrives within it at 1 Mbit/s.
BODY_TIMEOUT_S = 300.0


# Large bodies that may be on their way at once, each as large as is accepted.
_NUM_LARGEST = 16
# What every body may have besides: so that nobody's large ones are in the way of ordinary ones.
_FREE_BYTES = 256 * 1024
_LONG_BODY_BYTES = 1 << 20


class BodyMemory:
    """What bodies that are being read may hold together. Many clients that each send a large one,
    slowly, would fill the machine's memory otherwise."""

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
    """What browsers send of any page without asking first is not: text, forms, uploads.

    Source: "JSON MIME type" of WHATWG's MIME Sniffing.
    """
    essence = content_type.partition(";")[0].strip().lower()
    return essence in ("application/json", "text/json") or essence.endswith("+json")
