"""The answers of `/v1/chat/completions`."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import msgspec

from penstock.server.api.openai.writer import OpenAIWriter, encode
from penstock.server.output.delta import LogprobEntry, OutputDelta
from penstock.server.output.detokenizer import Vocabulary
from penstock.server.output.logprobs import EchoedTokens, finite
from penstock.server.output.parts import CallArguments, CallStart, Part, ReasoningPart, TextPart
from penstock.server.protocol.chat import ChatCompletionRequest

# DeepSeek's name, which most servers and clients took over, and vLLM's newer one. Clients read the
# one or the other, and those that know both take the first that is there.
_REASONING = ("reasoning_content", "reasoning")


class ChatWriter(OpenAIWriter):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    ends_with_text = False
    closing: ClassVar = {"delta": {}, "logprobs": None}
    opening: ClassVar = closing | {
        "delta": {"role": "assistant", "content": ""},
        "finish_reason": None,
    }
    around_text = b'"delta":{"content":', b"}"
    body_nulls: ClassVar = {"prompt_logprobs": None, "prompt_token_ids": None}
    _fields: ChatCompletionRequest

    def _choice(self, delta: OutputDelta) -> dict[str, Any]:
        message = message_of(self._shown(delta.all_parts))
        if self._fields.speaks_functions and (calls := message.pop("tool_calls", None)):
            message["function_call"] = calls[0]["function"]
        has_logprobs = self._fields.num_logprobs is not None
        choice = {
            "index": delta.choice,
            "message": message,
            "logprobs": self._logprobs(delta.logprobs) if has_logprobs else None,
            **self._ending(delta),
            "token_ids": None,
        }
        return choice | self._delta_extras(delta, is_first=True)

    def _head_extras(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt_ids[0]} if self._prompt_ids else {}

    def _delta_extras(self, delta: OutputDelta, is_first: bool) -> dict[str, Any]:
        return {"token_ids": delta.token_ids} if self._prompt_ids else {}

    def _ending(self, delta: OutputDelta) -> dict[str, Any]:
        ending = super()._ending(delta)
        if self._fields.speaks_functions and delta.finish_reason == "tool_calls":
            ending["finish_reason"] = "function_call"
        return ending

    def _shown(self, parts: Sequence[Part]) -> Sequence[Part]:
        if self._fields.include_reasoning is not False:
            return parts
        return [part for part in parts if not isinstance(part, ReasoningPart)]

    def _add_prompt_logprobs(self, body: dict[str, Any], prompts: list[msgspec.Raw]) -> None:
        body["prompt_logprobs"] = prompts[0]

    def _logprobs(
        self, entries: list[LogprobEntry], echoed: EchoedTokens | None = None
    ) -> dict[str, Any]:
        """A chat's answer echoes nothing."""
        num_top, names_ids = self._fields.num_logprobs, self._fields.return_tokens_as_token_ids
        content = logprob_content(entries, self._vocabulary, num_top, names_ids=bool(names_ids))
        return {"content": content, "refusal": None}

    def _part_events(self, delta: OutputDelta) -> bytes:
        """The ids and logprobs of the tokens are in the first event."""
        assert delta.parts is not None
        write = function_delta_of if self._fields.speaks_functions else delta_of
        parts = [write(part) for part in self._shown(delta.parts)]
        if not parts and (delta.logprobs or delta.token_ids):
            parts = [{}]
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        extras = self._delta_extras(delta, False) if delta.token_ids else {}
        events = []
        for part in parts:
            choice = {"index": delta.choice, "delta": part, "logprobs": logprobs}
            events.append(self._event(encode(choice | {"finish_reason": None} | extras)))
            logprobs, extras = None, {}
        return b"".join(events)


def logprob_content(
    entries: list[LogprobEntry],
    vocabulary: Vocabulary,
    num_top: int | None,
    *,
    names_ids: bool = False,
) -> list[dict[str, Any]]:
    """The tokens' logprobs as chats and responses have them. names_ids: a
    token is named "token_id:5" (vLLM's form), so that two of one spelling can be told apart."""

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        spelling = vocabulary.spelling(token_id)
        name = f"token_id:{token_id}" if names_ids else spelling.decode(errors="replace")
        return {"token": name, "logprob": finite(logprob), "bytes": list(spelling)}

    return [
        token(entry.token_id, entry.logprobs.logprob)
        | {"top_logprobs": [token(*pair) for pair in entry.logprobs.top[:num_top]]}
        for entry in entries
    ]


def message_of(parts: Iterable[Part]) -> dict[str, Any]:
    """The assistant's message. content is null if there are only calls or reasoning."""
    text, reasoning, calls = "", "", list[dict[str, Any]]()
    for part in parts:
        match part:
            case TextPart():
                text += part.text
            case ReasoningPart():
                reasoning += part.text
            case CallStart():
                calls.append({"id": part.id, **_begun(part)})
            case CallArguments(is_custom=True):
                calls[part.index]["custom"]["input"] += part.text
            case CallArguments():
                calls[part.index]["function"]["arguments"] += part.text
    content = text or (None if calls or reasoning else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    message |= dict.fromkeys(_REASONING, reasoning or None)  # always there, as at vLLM
    if calls:
        message["tool_calls"] = calls
    return message


def function_delta_of(part: Part) -> dict[str, Any]:
    """`delta_of` in OpenAI's older form, which has no ids."""
    delta = delta_of(part)
    if calls := delta.pop("tool_calls", None):
        delta["function_call"] = calls[0]["function"]
    return delta


def delta_of(part: Part) -> dict[str, Any]:
    """Id and name come once: clients join what they get."""
    match part:
        case TextPart():
            return {"content": part.text}
        case ReasoningPart():
            return dict.fromkeys(_REASONING, part.text)
        case CallStart():
            return {"tool_calls": [{"index": part.index, "id": part.id, **_begun(part)}]}
        case CallArguments(is_custom=True):
            return {"tool_calls": [{"index": part.index, "custom": {"input": part.text}}]}
        case CallArguments():
            return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


def _begun(call: CallStart) -> dict[str, Any]:
    if call.is_custom:
        return {"type": "custom", "custom": {"name": call.name, "input": ""}}
    return {"type": "function", "function": {"name": call.name, "arguments": ""}}
