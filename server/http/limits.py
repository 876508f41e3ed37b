"""What is refused unread: to parse it, or to encode it, would keep all others waiting.

A megabyte of text takes a second to encode; a hundred thousand objects, or two million token ids,
half a second to parse.
"""

from typing import Protocol

from penstock.server.errors import InvalidRequest

# Of a body, braces and colons in its texts included. Legitimate ones stay far below, since each
# costs about a token; it is the parser, which stops the event loop, that must not meet millions.
MAX_OBJECTS = 100_000
MAX_KEYS = 300_000
# Of lists, the commas in texts included: more than the longest context has token ids.
MAX_ITEMS = 1 << 21


def check_parsable(body: bytes) -> None:
    """Raises InvalidRequest. Counts bytes, so it takes a millisecond a megabyte."""
    for sign, limit in ((b"{", MAX_OBJECTS), (b":", MAX_KEYS), (b",", MAX_ITEMS)):
        if len(body) > limit and body.count(sign) > limit:
            message = (
                f"the body has more than {limit} {sign.decode()!r}, so it would take too long to "
                "read; send fewer messages, fields or items at a time"
            )
            raise InvalidRequest(message, code="body_too_complex")


class Room(Protocol):
    """The model's, see `ServedModel`."""

    @property
    def max_prompt_chars(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...


def check_could_fit(room: Room, param: str, *, num_chars: int = 0, num_messages: int = 0) -> None:
    """Raises InvalidRequest. A token is a few characters at most, a message a token at least."""
    counted = {
        "characters": (num_chars, room.max_prompt_chars),
        "messages": (num_messages, room.max_model_len),
    }
    for what, (num, limit) in counted.items():
        if num > limit:
            message = (
                f"{param} has {num} {what}, more than this model's context of "
                f"{room.max_model_len} tokens can hold; shorten it"
            )
            raise InvalidRequest(message, param=param, code="context_length_exceeded")
