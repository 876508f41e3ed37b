"""A request's body: read within a size and a time; refused if parsing it would take long."""

import asyncio
import codecs

from starlette.requests import Request

from penstock.server.errors import (
    BodyTooLarge,
    BodyTooSlow,
    InvalidRequest,
    UnsupportedContentType,
    UnsupportedEncoding,
)

# The largest body that is accepted by default arrives within it at 1 Mbit/s.
BODY_TIMEOUT_S = 300.0
# Of a body, braces and colons in its texts included. Legitimate bodies stay far below, since each
# costs about a token; the parser, which stops the event loop, must not meet millions: a hundred
# thousand objects, or two million token ids, take half a second to parse.
MAX_OBJECTS = 100_000
MAX_KEYS = 300_000
# Of lists, the commas in texts included: more than the longest context has token ids.
MAX_ITEMS = 1 << 21


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
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise BodyTooLarge(limit)
                chunks.append(chunk)
    except TimeoutError as error:
        raise BodyTooSlow(BODY_TIMEOUT_S) from error
    body = b"".join(chunks).removeprefix(codecs.BOM_UTF8)
    check_parsable(body)
    return body


def is_json(content_type: str) -> bool:
    """What browsers send of any page without asking first is not: text, forms, uploads.

    Source: "JSON MIME type" of WHATWG's MIME Sniffing.
    """
    essence = content_type.partition(";")[0].strip().lower()
    return essence in ("application/json", "text/json") or essence.endswith("+json")


def check_parsable(body: bytes) -> None:
    """Raises InvalidRequest. Counts bytes, so it takes a millisecond per megabyte."""
    for sign, limit in ((b"{", MAX_OBJECTS), (b":", MAX_KEYS), (b",", MAX_ITEMS)):
        if len(body) > limit and body.count(sign) > limit:
            message = (
                f"the body has more than {limit} {sign.decode()!r}, so it would take too long to "
                "read; send fewer messages, fields or items at a time"
            )
            raise InvalidRequest(message, code="body_too_complex")
