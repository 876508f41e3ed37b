"""An Anthropic message while it is generated: its blocks, and the events that report them.

For a plain body the events are thrown away, so what is streamed adds up to the body.
"""

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from penstock.server.errors import reply_to
from penstock.server.output.delta import OutputDelta, Usage
from penstock.server.output.generation import Generation
from penstock.server.output.parts import CallArguments, CallStart, Part, ReasoningPart, TextPart

_encode = msgspec.json.Encoder().encode
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'

# How a block of each type grows: at a token a delta, encoding the object anew would cost most.
_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%%d,"delta":%b}\n\n'
)
_DELTAS = {
    "text": _DELTA % b'{"type":"text_delta","text":%b}',
    "thinking": _DELTA % b'{"type":"thinking_delta","thinking":%b}',
    "tool_use": _DELTA % b'{"type":"input_json_delta","partial_json":%b}',
}


class MessageWriter:
    """One message. stop_string: returns at the end the one that ended the answer, if one did."""

    def __init__(
        self, model: str, usage: Usage, stop_string: Callable[[], str | None] = lambda: None
    ) -> None:
        self.message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_fields(usage),
        }
        self._stop_string = stop_string
        self._finish_reason: str | None = None
        self._last: Part | None = None  # of the block that is open
        self._texts: list[str] = []

    def body(self, deltas: list[OutputDelta], generation: Generation) -> list[bytes]:
        self.delta(deltas[0])
        self.end(generation.usage)
        return [_encode(self.message)]

    def openings(self, num_choices: int) -> bytes:
        assert num_choices == 1, num_choices
        return _event("message_start", message=self.message)

    def delta(self, delta: OutputDelta) -> bytes:
        self._finish_reason = delta.finish_reason
        events: list[bytes] = []
        for part in delta.all_parts:
            events.extend(self._turn_to(part))
            if not isinstance(part, CallStart):
                events.append(self._part_delta(part))
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        events: list[bytes] = []
        if not self._last:  # no token, or none with text: an empty block
            events += self._turn_to(TextPart(""))
        events.append(self._close())
        self.message["usage"] = usage_fields(usage)
        stop = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_string()}
        self.message |= stop
        events.append(_event("message_delta", delta=stop, usage=self.message["usage"]))
        events.append(_event("message_stop"))
        return b"".join(events)

    def failure(self, error: Exception) -> bytes:
        return b"event: error\ndata: %b\n\n" % reply_to(error).anthropic_body

    def _stop_reason(self) -> str:
        if self._finish_reason == "length":
            return "max_tokens"
        if self._stop_string() is not None:
            return "stop_sequence"
        has_calls = any(block["type"] == "tool_use" for block in self.message["content"])
        return "tool_use" if has_calls else "end_turn"

    def _turn_to(self, part: Part) -> Iterator[bytes]:
        """Ends the block that is open and begins one, where the part does not belong to it."""
        if self._last and _continues(self._last, part):
            return
        if self._last:
            yield self._close()
        self._last = part
        index = len(self.message["content"])
        self.message["content"].append(_block_for(part))
        yield _event("content_block_start", index=index, content_block=self._block)
        if not index:
            yield _PING

    def _part_delta(self, part: TextPart | ReasoningPart | CallArguments) -> bytes:
        self._texts.append(part.text)
        index = len(self.message["content"]) - 1
        return _DELTAS[self._block["type"]] % (index, _encode(part.text))

    def _close(self) -> bytes:
        text, self._texts = "".join(self._texts), []
        block = self._block
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
        index = len(self.message["content"]) - 1
        signed = b""
        if block["type"] == "thinking":  # its clients wait for one; ours is empty
            delta = {"type": "signature_delta", "signature": block["signature"]}
            signed = _event("content_block_delta", index=index, delta=delta)
        return signed + _event("content_block_stop", index=index)

    @property
    def _block(self) -> dict[str, Any]:
        block: dict[str, Any] = self.message["content"][-1]
        return block


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Anthropic counts what came from the cache apart from the rest of the prompt."""
    fields = {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_completion,
    }
    return fields | ({"repetition_detected": usage.num_looped} if usage.num_looped else {})


def _continues(last: Part, part: Part) -> bool:
    if isinstance(last, CallStart):
        return isinstance(part, CallArguments) and part.index == last.index
    return type(last) is type(part)


def _block_for(part: Part) -> dict[str, Any]:
    match part:
        case TextPart():
            return {"type": "text", "text": ""}
        case ReasoningPart():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case CallStart():
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        case CallArguments():
            raise AssertionError(f"arguments of a call that did not start: {part}")


def _arguments(text: str) -> dict[str, Any]:
    """Arguments cut off before their end are not an object; the stop_reason reports that."""
    try:
        arguments = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))
