"""APIs served as chat completions: their common fields, and renaming fields in errors."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from pydantic import ValidationError

from penstock.server.errors import InvalidRequest
from penstock.server.protocol.chat import ContentPart
from penstock.server.protocol.invalid_fields import UNUSED, invalid_fields
from penstock.server.protocol.openai import ParsedRequest, Wire
from penstock.server.structured.constraint import SYNONYMS

# Fields of chat completions that mean the same in the other APIs, which do not have them.
SHARED_FIELDS = frozenset(
    (
        *("seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias", "top_k", "min_p"),
        *("repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "bad_words"),
        *("include_stop_str_in_output", "allowed_token_ids", "skip_special_tokens", "priority"),
        *("cache_salt", "chat_template", "chat_template_kwargs", "thinking_token_budget"),
        *("spaces_between_special_tokens", "structured_outputs", "num_speculative_tokens"),
        "mm_processor_kwargs",
        *("banned_strings", "stop_on_loop", "repetition_detection"),
        *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
        *("dry_sequence_breakers", "xtc_probability", "xtc_threshold"),
        *(*SYNONYMS, *UNUSED),
    )
)


class TranslatedRequest(ParsedRequest):
    """A request of an API that is served as chat completions, which check what they have too."""

    num_answers: ClassVar[int] = 1
    known_extras = SHARED_FIELDS - set(UNUSED)
    # Names in errors: of fields of the API that serves it -> of this API's own.
    own_names: ClassVar[Mapping[str, str]]

    @property
    def tool_indexes(self) -> Sequence[int]:
        """The index among the client's tools of each that is served; empty if they are the same."""
        return ()

    @contextlib.contextmanager
    def error_names(self) -> Iterator[None]:
        try:
            yield
        except InvalidRequest as error:
            raise _renamed(error, self.own_names, self.tool_indexes) from error


def check_numbers(*values: object) -> None:
    """Raises InvalidRequest for an integer that could not be written back."""
    try:
        msgspec.json.encode(values)
    except OverflowError as error:
        raise InvalidRequest("a number has more than 64 bits; send it shorter") from error


def content_of(parts: Sequence[str | ContentPart]) -> str | list[ContentPart]:
    """Texts and images as the content of a chat's message: text where it has no images."""
    if all(isinstance(part, str) for part in parts):
        return "".join(map(str, parts))
    return [ContentPart(type="text", text=p) if isinstance(p, str) else p for p in parts]


_TOOL = re.compile(r"tools\[(\d+)\]")


def _renamed(
    error: InvalidRequest, names: Mapping[str, str], tool_indexes: Sequence[int]
) -> InvalidRequest:
    param, message = error.param or "", str(error)
    for chat_name, name in names.items():
        if chat_name == "messages" and param.startswith("messages"):
            # The messages of a chat are numbered differently from the client's items.
            message, param = message.replace(param, name), name
        elif param == chat_name:
            message, param = message.replace(param, name), name
        elif "_" in chat_name or "." in chat_name:  # such a word means nothing else
            message, param = message.replace(chat_name, name), param.replace(chat_name, name)
    if tool_indexes and (found := _TOOL.match(param)):
        in_chat, there = found[0], f"tools[{tool_indexes[int(found[1])]}]"
        message, param = message.replace(in_chat, there), param.replace(in_chat, there)
    return InvalidRequest(message, param=param or None, code=error.code, details=error.details)


def checked(model: type[Wire], value: object, at: str) -> Any:
    """The value, if it is as the model says. Raises InvalidRequest, with the path from `at` on."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_fields(error, model, at=at) from error
