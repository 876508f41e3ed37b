"""Bodies that are refused without being parsed, since parsing them would delay every other request.

A hundred thousand objects, or two million token ids, take half a second to parse.
"""

from penstock.server.errors import InvalidRequest

# Counts of braces and colons, including those in texts. Legitimate bodies have far fewer, since
# each costs about a token; the limits protect the parser, which blocks the event loop.
MAX_OBJECTS = 100_000
MAX_KEYS = 300_000
# Count of commas, including those in texts: more than the longest context has token ids.
MAX_ITEMS = 1 << 21


def check_parsable(body: bytes) -> None:
    """Raises InvalidRequest. Counts bytes, which takes a millisecond per megabyte."""
    for sign, limit in ((b"{", MAX_OBJECTS), (b":", MAX_KEYS), (b",", MAX_ITEMS)):
        if len(body) > limit and body.count(sign) > limit:
            message = (
                f"the body has more than {limit} {sign.decode()!r}, so it would take too long to "
                "parse; send fewer messages, fields or items at a time"
            )
            raise InvalidRequest(message, code="body_too_complex")
