"""What the APIs share that are served as chat completions: the same fields, and one's complaints
in another's words."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from pydantic import ValidationError

from penstock.server.errors import InvalidRequest
from penstock.server.protocol.openai import ChatCompletionRequest, Wire, invalid_fields

# Fields of chat completions that mean the same there, for those who steer sampling beyond them.
SAME_IN_CHAT = frozenset(
    (
        *("seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias", "top_k", "min_p"),
        *("repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "bad_words"),
        *("include_stop_str_in_output", "allowed_token_ids", "skip_special_tokens", "priority"),
        *("cache_salt", "chat_template", "chat_template_kwargs", "thinking_token_budget"),
        "spaces_between_special_tokens",
    )
)


def as_chat(fields: dict[str, Any]) -> ChatCompletionRequest:
    """Raises InvalidRequest."""
    try:
        body = msgspec.json.encode(fields)
    except OverflowError as error:
        raise InvalidRequest("a number has more than 64 bits; send it shorter") from error
    return ChatCompletionRequest.parse(body)


_TOOL = re.compile(r"tools\[(\d+)\]")


@contextlib.contextmanager
def in_other_words(names: dict[str, str], tool_indexes: Sequence[int] = ()) -> Iterator[None]:
    """Complaints about fields get the names that these have in the client's API.

    tool_indexes: of each of the chat's tools, where it is among the client's; as in the chat where
    it is not told.
    """
    try:
        yield
    except InvalidRequest as error:
        raise _renamed(error, names, tool_indexes) from error


def _renamed(
    error: InvalidRequest, names: dict[str, str], tool_indexes: Sequence[int]
) -> InvalidRequest:
    param, message = error.param or "", str(error)
    for chat_name, name in names.items():
        if chat_name == "messages" and param.startswith("messages"):
            # The messages of a chat are not counted as a client's items are.
            message, param = message.replace(param, name), name
        elif param == chat_name:
            message, param = message.replace(param, name), name
        elif "_" in chat_name or "." in chat_name:  # such a word means nothing else
            message, param = message.replace(chat_name, name), param.replace(chat_name, name)
    if tool_indexes and (found := _TOOL.match(param)):
        in_chat, there = found[0], f"tools[{tool_indexes[int(found[1])]}]"
        message, param = message.replace(in_chat, there), param.replace(in_chat, there)
    return InvalidRequest(message, param=param or None, code=error.code)


def checked(model: type[Wire], value: object, at: str) -> Any:
    """The value, if it is as the model says. Raises InvalidRequest, with the path from `at` on."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_fields(error, model, at=at) from error
