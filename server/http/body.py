"""A request's body: read within a size and a time; refused if parsing it would take long."""

import asyncio
import codecs

from starlette.requests import Request

from penstock.server.errors import (
    BodyTooLarge,
    BodyTooSlow,
    UnsupportedContentType,
    UnsupportedEncoding,
)
from penstock.server.http.parsable import SignCounts, check_parsable

# The largest body that is accepted by default arrives within it at 1 Mbit/s.
BODY_TIMEOUT_S = 300.0


async def read_body(request: Request, limit: int) -> bytes:
    """Raises UnsupportedContentType, UnsupportedEncoding, InvalidRequest, BodyTooLarge as soon as
    that is known, or BodyTooSlow."""
    content_type = request.headers.get("content-type", "")
    if content_type and not is_json(content_type):
        raise UnsupportedContentType(content_type)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedEncoding(encoding)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise BodyTooLarge(limit)
    chunks, size, counts = [], 0, SignCounts()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise BodyTooLarge(limit)
                chunks.append(chunk)
                counts.add(chunk)
    except TimeoutError as error:
        raise BodyTooSlow(BODY_TIMEOUT_S) from error
    body = b"".join(chunks).removeprefix(codecs.BOM_UTF8)
    await check_parsable(body, counts)
    return body


def is_json(content_type: str) -> bool:
    """What browsers send of any page without asking first is not: text, forms, uploads.

    Source: "JSON MIME type" of WHATWG's MIME Sniffing.
    """
    essence = content_type.partition(";")[0].strip().lower()
    return essence in ("application/json", "text/json") or essence.endswith("+json")
