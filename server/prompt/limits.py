"""Prompts that cannot fit the context, refused before the time is spent to encode them.

A megabyte of text takes a second to encode, during which every other request waits.
"""

from typing import Protocol

from penstock.server.errors import InvalidRequest


class ContextLimits(Protocol):
    """The limits of the served model, see `ServedModel`."""

    @property
    def max_prompt_chars(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...


def check_could_fit(
    limits: ContextLimits, param: str, *, num_chars: int = 0, num_messages: int = 0
) -> None:
    """Raises InvalidRequest. A token has few characters, and a message has at least one token."""
    counted = {
        "characters": (num_chars, limits.max_prompt_chars),
        "messages": (num_messages, limits.max_model_len),
    }
    for what, (num, limit) in counted.items():
        if num > limit:
            message = (
                f"{param} has {num} {what}, more than this model's context of "
                f"{limits.max_model_len} tokens can hold; shorten it"
            )
            raise InvalidRequest(message, param=param, code="context_length_exceeded")
