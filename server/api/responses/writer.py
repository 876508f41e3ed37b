"""A response while it is generated: its items, and the events that report each change.

For a plain body the events are thrown away, so what is streamed adds up to the body. A text's delta
is bytes that were put together when its item began, around an escaped string.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from penstock.scheduler.types import SamplingParams
from penstock.server.api.openai.chat_writer import logprob_content
from penstock.server.errors import reply_to
from penstock.server.output.delta import LogprobEntry, OutputDelta, Usage
from penstock.server.output.detokenizer import Vocabulary
from penstock.server.output.generation import Generation
from penstock.server.output.parts import CallArguments, CallStart, Part, ReasoningPart, TextPart
from penstock.server.protocol.responses import ResponsesRequest

_encode = msgspec.json.Encoder().encode
_REASONING = ("effort", "summary")
Item = dict[str, Any]


class ResponseWriter:
    """One response. `on_end` gets it when it has ended or failed."""

    def __init__(
        self,
        head: Item,
        vocabulary: Vocabulary,
        num_logprobs: int | None,
        on_end: Callable[[Item], None],
    ) -> None:
        """head: all fields of the response that are known before its answer is."""
        self.response: Item = head | {"status": "in_progress", "output": []}
        self._vocabulary = vocabulary
        self._num_logprobs = num_logprobs
        self._on_end = on_end
        self._sequence_number = -1
        self._item: _OpenItem | None = None
        self._is_cut = False
        self._is_open = False

    def body(self, deltas: list[OutputDelta], generation: Generation) -> list[bytes]:
        self.delta(deltas[0])
        self.end(generation.usage)
        return [_encode(self.response)]

    def openings(self, num_choices: int) -> bytes:
        assert num_choices == 1, num_choices
        self._is_open = True
        return self._event("response.created", response=self.response) + self._event(
            "response.in_progress", response=self.response
        )

    def delta(self, delta: OutputDelta) -> bytes:
        self._is_cut = delta.finish_reason == "length"
        entries = delta.logprobs
        events: list[bytes] = []
        for part in delta.all_parts:
            events.extend(self._turn_to(part))
            assert self._item, part
            events.append(self._item.grow(part, entries if isinstance(part, TextPart) else []))
            entries = [] if isinstance(part, TextPart) else entries
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        events: list[bytes] = []
        if not self._item:  # no token, or none with text: an empty message
            events += self._turn_to(TextPart(""))
        events.append(self._close_item("incomplete" if self._is_cut else "completed"))
        self.response["usage"] = usage_fields(usage)
        if self._is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
            events.append(self._over("incomplete"))
        else:
            self.response["completed_at"] = int(time.time())
            events.append(self._over("completed"))
        return b"".join(events)

    def failure(self, error: Exception) -> bytes:
        events = b"" if self._is_open else self.openings(1)
        if self._item:
            events += self._close_item("incomplete")
        self.response["error"] = {"code": "server_error", "message": reply_to(error).message}
        return events + self._over("failed")

    def event(self, kind: str, **fields: Any) -> bytes:
        """For the items, whose events are numbered among all."""
        return self._event(kind, output_index=len(self.response["output"]), **fields)

    def next_number(self) -> int:
        self._sequence_number += 1
        return self._sequence_number

    def logprobs(self, entries: list[LogprobEntry]) -> list[Any]:
        return logprob_content(entries, self._vocabulary, self._num_logprobs)

    def _turn_to(self, part: Part) -> Iterator[bytes]:
        """Ends the item that is open and begins one, where the part does not belong to it."""
        if self._item and self._item.takes(part):
            return
        if self._item:
            yield self._close_item("completed")
        self._item = _item_for(part, self)
        yield self._item.open()

    def _close_item(self, status: str) -> bytes:
        assert self._item
        events = self._item.close(status)
        self.response["output"].append(self._item.whole)
        self._item = None
        return events

    def _over(self, status: str) -> bytes:
        self.response["status"] = status
        event = self._event(f"response.{status}", response=self.response)
        self._on_end(self.response)
        return event

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, **fields, "sequence_number": self.next_number()}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(data))


class _OpenItem:
    """An item of the output that still grows. `whole` is the item as the body has it."""

    prefix: str
    part_type: type[Part]
    # The event with more text and the one with the whole name it so: text or arguments.
    text_kind: str
    whole_name: str

    def __init__(self, writer: ResponseWriter, whole: Item) -> None:
        self._writer = writer
        self._id = f"{self.prefix}_{secrets.token_hex(12)}"
        self.whole = {"id": self._id, "status": "in_progress", **whole}
        self._texts: list[str] = []
        self._entries: list[LogprobEntry] = []
        place = {"item_id": self._id, "output_index": len(writer.response["output"])}
        self._place = {"item_id": self._id} | self._content_place()
        kind = f"response.{self.text_kind}.delta"
        head = _encode({"type": kind, **place, **self._content_place()})[:-1]
        self._before = b"event: %b\ndata: %b" % (kind.encode(), head)

    def takes(self, part: Part) -> bool:
        return isinstance(part, self.part_type)

    def open(self) -> bytes:
        added = self._writer.event("response.output_item.added", item=self.whole)
        self.whole |= self._filled("")
        return added + self._part_event("added")

    def grow(self, part: Part, entries: list[LogprobEntry]) -> bytes:
        assert not isinstance(part, CallStart)
        self._texts.append(part.text)
        self._entries += entries
        number = self._writer.next_number()
        return b'%b%b,"sequence_number":%d,"delta":%b}\n\n' % (
            self._before,
            self._logprobs_of(entries),
            number,
            _encode(part.text),
        )

    def close(self, status: str) -> bytes:
        text = "".join(self._texts)
        self.whole |= {"status": status} | self._filled(text)
        return b"".join(
            (
                self._writer.event(
                    f"response.{self.text_kind}.done",
                    **self._place,
                    **{self.whole_name: text},
                    **self._done_fields(),
                ),
                self._part_event("done"),
                self._writer.event("response.output_item.done", item=self.whole),
            )
        )

    def _content_place(self) -> Item:
        return {"content_index": 0}

    def _logprobs_of(self, entries: list[LogprobEntry]) -> bytes:
        return b""

    def _done_fields(self) -> Item:
        return {}

    def _filled(self, text: str) -> Item:
        """The fields of the item that its text goes into."""
        raise NotImplementedError

    def _part_event(self, which: str) -> bytes:
        """The content part, where the item has one, was added or is done."""
        part = self.whole["content"][0]
        return self._writer.event(f"response.content_part.{which}", **self._place, part=part)


class _OpenMessage(_OpenItem):
    prefix, text_kind, whole_name = "msg", "output_text", "text"
    part_type = TextPart

    def __init__(self, writer: ResponseWriter) -> None:
        super().__init__(writer, {"type": "message", "role": "assistant", "content": []})

    def _filled(self, text: str) -> Item:
        logprobs = self._writer.logprobs(self._entries)
        part = {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text}
        return {"content": [part]}

    def _logprobs_of(self, entries: list[LogprobEntry]) -> bytes:
        return b',"logprobs":' + _encode(self._writer.logprobs(entries))

    def _done_fields(self) -> Item:
        return {"logprobs": self._writer.logprobs(self._entries)}


class _OpenReasoning(_OpenItem):
    prefix, text_kind, whole_name = "rs", "reasoning_text", "text"
    part_type = ReasoningPart

    def __init__(self, writer: ResponseWriter) -> None:
        super().__init__(writer, {"type": "reasoning", "summary": [], "content": []})

    def _filled(self, text: str) -> Item:
        return {"content": [{"type": "reasoning_text", "text": text}]}


class _OpenCall(_OpenItem):
    prefix, text_kind, whole_name = "fc", "function_call_arguments", "arguments"
    part_type = CallArguments
    item_type = "function_call"

    def __init__(self, writer: ResponseWriter, start: CallStart) -> None:
        self._start = start
        call = {"type": self.item_type, "call_id": start.id, "name": start.name}
        super().__init__(writer, call | {self.whole_name: ""})

    def takes(self, part: Part) -> bool:
        return super().takes(part) and part.index == self._start.index

    def grow(self, part: Part, entries: list[LogprobEntry]) -> bytes:
        return b"" if isinstance(part, CallStart) else super().grow(part, entries)

    def _content_place(self) -> Item:
        return {}

    def _filled(self, text: str) -> Item:
        return {self.whole_name: text}

    def _done_fields(self) -> Item:
        return {"name": self._start.name}

    def _part_event(self, which: str) -> bytes:
        return b""


class _OpenCustomCall(_OpenCall):
    prefix, text_kind, whole_name = "ctc", "custom_tool_call_input", "input"
    item_type = "custom_tool_call"

    def _done_fields(self) -> Item:
        return {}


def _item_for(part: Part, writer: ResponseWriter) -> _OpenItem:
    match part:
        case TextPart():
            return _OpenMessage(writer)
        case ReasoningPart():
            return _OpenReasoning(writer)
        case CallStart(is_custom=True):
            return _OpenCustomCall(writer, part)
        case CallStart():
            return _OpenCall(writer, part)
        case CallArguments():
            raise AssertionError(f"arguments of a call that did not start: {part}")


def response_head(
    fields: ResponsesRequest, response_id: str, model: str, sampling: SamplingParams
) -> Item:
    """Returns what is known of a response before its answer. sampling: the values in effect."""
    form = fields.text.format if fields.text and fields.text.format else {"type": "text"}
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "frequency_penalty": sampling.frequency_penalty,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "presence_penalty": sampling.presence_penalty,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {name: getattr(fields.reasoning, name, None) for name in _REASONING},
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": fields.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": form, "verbosity": fields.text.verbosity if fields.text else None},
        "tool_choice": fields.tool_choice or "auto",
        "tools": [_tool(tool) for tool in fields.served_tools],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": fields.truncation or "disabled",
        "usage": None,
        "user": fields.user,
    }


def usage_fields(usage: Usage) -> Item:
    details = {"reasoning_tokens": usage.num_reasoning}
    if usage.num_looped:
        details["repetition_detected"] = usage.num_looped
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {
            "cached_tokens": usage.num_cached,
            "cache_write_tokens": 0,  # they cost nothing here
        },
        "output_tokens": usage.num_completion,
        "output_tokens_details": details,
        "total_tokens": usage.num_prompt + usage.num_completion,
    }


def _tool(tool: Item) -> Item:
    described = {"type": tool["type"]} | {key: tool.get(key) for key in ("name", "description")}
    if tool["type"] == "custom":
        return described | {"format": tool.get("format") or {"type": "text"}}
    return described | {key: tool.get(key) for key in ("parameters", "strict")}
