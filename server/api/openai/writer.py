"""How OpenAI's two APIs of generated text write their answers: what completions and chats share.

A chunk is bytes that were put together once per stream, around an escaped string: with one token a
chunk, encoding the object anew would cost more than all the rest of a stream.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import msgspec

from penstock.server.errors import reply_to
from penstock.server.output.delta import LogprobEntry, OutputDelta, Usage, likeliest
from penstock.server.output.detokenizer import Vocabulary
from penstock.server.output.generation import Generation
from penstock.server.output.logprobs import EchoedTokens, by_position
from penstock.server.protocol.openai import GenerationFields

encode = msgspec.json.Encoder().encode


class Head:
    """The fields that a body and all chunks of its stream share: id, time, model, fingerprint."""

    def __init__(self, request_id: str, model: str, fingerprint: str) -> None:
        self._fields = {
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._id = request_id

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, **self._fields}


class OpenAIWriter:
    """One answer's chunks, and the body that they add up to."""

    object: ClassVar[str]
    chunk_object: ClassVar[str]
    # Whether a choice's last text and its end share a chunk: in completions as at vLLM, whose
    # clients take each chunk for a token; not in chats, as at OpenAI.
    ends_with_text: ClassVar[bool]
    # A choice besides its index: in its first chunk, if there is one before any text; and in its
    # last one, without its end, if that has no text.
    opening: ClassVar[dict[str, Any] | None]
    closing: ClassVar[dict[str, Any]]
    # Between a choice's index and the JSON string of a chunk's text, and after that.
    around_text: ClassVar[tuple[bytes, bytes]]
    # Members that vLLM's bodies always have, so that its clients read them unasked.
    body_nulls: ClassVar[dict[str, None]] = {}

    def __init__(
        self,
        head: Head,
        vocabulary: Vocabulary,
        fields: GenerationFields,
        prompts: Sequence[tuple[int, ...]] = (),
        usage: Usage | None = None,
        timings: Callable[[int], dict[str, float]] | None = None,
    ) -> None:
        """prompts: the ids of each, for return_token_ids. usage: of the generation, for chunks that
        have the usage until then. timings: of an answer that has ended, if they are wanted."""
        self._head = head
        self._vocabulary = vocabulary
        self._fields = fields
        self._n = fields.n or 1
        # Of each choice; empty unless the client wants ids.
        self._prompt_ids = [
            ids for ids in prompts for _ in range(self._n) if fields.return_token_ids
        ]
        self._running_usage = usage if fields.wants_running_usage else None
        self._timings = timings
        # {"id":...,"model":...  with the brace left open
        self._chunk_head = b"data: " + encode(head.fields(self.chunk_object))[:-1] + b',"choices":['
        self._no_usage = b',"usage":null' if fields.wants_usage else b""
        self._plain_unended = b',"finish_reason":null}]' + self._no_usage + b"}\n\n"
        self._around_texts: dict[int, tuple[bytes, bytes]] = {}
        self._long_lists = LongLists()

    # The two APIs write these differently.

    def _choice(self, delta: OutputDelta) -> dict[str, Any]:
        """A whole choice of a body."""
        raise NotImplementedError

    def _logprobs(
        self, entries: list[LogprobEntry], echoed: EchoedTokens | None = None
    ) -> dict[str, Any]:
        raise NotImplementedError

    def _part_events(self, delta: OutputDelta) -> bytes:
        """An event for each part of an answer that has parts."""
        raise NotImplementedError

    def _head_extras(self) -> dict[str, Any]:
        """Returns the fields of a body, or of a stream's openings, besides the choices."""
        return {}

    def _delta_extras(self, delta: OutputDelta, is_first: bool) -> dict[str, Any]:
        """Returns the fields of a choice's chunk. is_first: no chunk before it had text or ids."""
        return {}

    def _add_prompt_logprobs(self, body: dict[str, Any], prompts: list[msgspec.Raw]) -> None:
        """prompts: of each prompt, as JSON."""
        raise NotImplementedError

    # The body.

    def body(self, deltas: list[OutputDelta], generation: Generation) -> list[bytes]:
        body = self.content(deltas, generation.usage)
        if self._timings:
            body["timings"] = self._timings(0)
        if self._fields.wanted_prompt_logprobs is not None:
            self._add_prompt_logprobs(body, self._prompt_logprobs(generation))
        return self._long_lists.encoded(body)

    def content(self, deltas: list[OutputDelta], usage: Usage) -> dict[str, Any]:
        """deltas: each choice as a whole."""
        if (num_sampled := self._fields.num_sampled) > self._n:
            deltas = likeliest(deltas, num_sampled, self._n)
        choices = [self._choice(delta) for delta in deltas]
        return {
            **self._head.fields(self.object),
            "choices": choices,
            "usage": usage_fields(usage),
            **self.body_nulls,
            **self._head_extras(),
        }

    def _prompt_logprobs(self, generation: Generation) -> list[msgspec.Raw]:
        num_top = self._fields.wanted_prompt_logprobs
        assert num_top is not None
        prompts = []
        for i, token_ids in enumerate(generation.request.prompt_token_ids):
            logprobs = generation.prompts[i].logprobs
            assert logprobs is not None
            slices = by_position(self._vocabulary, token_ids, logprobs, num_top)
            prompts.append(self._long_lists.add(map(encode, slices)))
        return prompts

    # The events.

    def openings(self, num_choices: int) -> bytes:
        if self.opening is None:
            return b""
        extras = self._head_extras()
        after = b"," + encode(extras)[1:-1] if extras else b""
        openings = ({"index": index} | self.opening for index in range(num_choices))
        return b"".join(self._event(encode(choice), after) for choice in openings)

    def delta(self, delta: OutputDelta) -> bytes:
        """Its text, if it has any, in one event, and its end there or in one of its own."""
        events, reason = b"", delta.finish_reason
        if delta.parts is not None:
            events = self._part_events(delta)
        elif delta.text or delta.logprobs or delta.token_ids or delta.echoed:
            is_first = delta.choice not in self._around_texts
            before, after = self._text_frame(delta.choice)
            logprobs = b"null"
            if delta.logprobs or delta.echoed:
                columns = self._logprobs(delta.logprobs, delta.echoed)
                logprobs = b"".join(self._long_lists.encoded(columns))
            if delta.token_ids:
                extras = self._delta_extras(delta, is_first)
                logprobs += b"," + encode(extras)[1:-1]
            events = before + encode(delta.text) + after + logprobs
            if reason and self.ends_with_text:
                return events + self._ended(delta)
            events += self._unended()
        if reason:
            closing = {"index": delta.choice} | self.closing | self._ending(delta)
            events += self._event(encode(closing), self._times(delta))
        return events

    def end(self, usage: Usage) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self._fields.wants_usage:
            return done
        return self._chunk_head + b'],"usage":' + encode(usage_fields(usage)) + b"}\n\n" + done

    def failure(self, error: Exception) -> bytes:
        return error_event(error)

    def _event(self, choice: bytes, extras: bytes = b"") -> bytes:
        return self._chunk_head + choice + b"]" + extras + self._usage() + b"}\n\n"

    def _unended(self) -> bytes:
        """The bytes that follow the logprobs of a chunk that is not the choice's last."""
        if self._running_usage is None:
            return self._plain_unended
        return b',"finish_reason":null}]' + self._usage() + b"}\n\n"

    def _ended(self, delta: OutputDelta) -> bytes:
        end = b"," + encode(self._ending(delta))[1:] + b"]"
        return end + self._times(delta) + self._usage() + b"}\n\n"

    def _times(self, delta: OutputDelta) -> bytes:
        """The timings of an answer, in the chunk that ends it."""
        return b',"timings":' + encode(self._timings(delta.choice)) if self._timings else b""

    def _ending(self, delta: OutputDelta) -> dict[str, Any]:
        """How a choice ended. stop_reason is vLLM's: null at the model's own end, whose token
        SGLang's matched_stop has."""
        ended_by = delta.ended_by
        is_own = isinstance(ended_by, int) and ended_by not in (self._fields.stop_token_ids or ())
        return {
            "finish_reason": delta.finish_reason,
            "stop_reason": None if is_own else ended_by,
            "matched_stop": ended_by,
        }

    def _usage(self) -> bytes:
        if self._running_usage is None:
            return self._no_usage
        return b',"usage":' + encode(usage_fields(self._running_usage))

    def _text_frame(self, index: int) -> tuple[bytes, bytes]:
        """The bytes around a text of this choice, made for its first."""
        if index not in self._around_texts:
            before, after = self.around_text
            head = self._chunk_head + b'{"index":%d,' % index
            self._around_texts[index] = head + before, after + b',"logprobs":'
        return self._around_texts[index]

    def _token_name(self, token_id: int) -> str:
        if self._fields.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self._vocabulary.spelling(token_id).decode(errors="replace")


class LongLists:
    """JSON lists of very many items, encoded in parts, in the place of which JSON has a mark. No
    other thread runs while a list is encoded, or while some hundred megabytes are copied."""

    _MARK = b"\0"  # JSON never has it

    def __init__(self) -> None:
        self._lists: list[list[bytes]] = []

    def add(self, parts: Iterable[bytes]) -> msgspec.Raw:
        """Its mark. parts: lists, as JSON, that together are the list."""
        pieces: list[bytes] = []
        for part in parts:
            if len(part) > 2:
                pieces.append((b"," if pieces else b"[") + part[1:-1])
        self._lists.append([*pieces, b"]" if pieces else b"[]"])
        return msgspec.Raw(b"%b%d%b" % (self._MARK, len(self._lists) - 1, self._MARK))

    def encoded(self, value: Any) -> list[bytes]:
        """The JSON of a value with marks in it, in pieces. The lists are forgotten."""
        pieces = []
        for i, text in enumerate(encode(value).split(self._MARK)):
            pieces += self._lists[int(text)] if i % 2 else [text]
        self._lists.clear()
        return pieces


def usage_fields(usage: Usage) -> dict[str, Any]:
    details = {"reasoning_tokens": usage.num_reasoning}
    if usage.num_looped:
        details["repetition_detected"] = usage.num_looped
    if usage.num_predicted is not None:
        details["accepted_prediction_tokens"] = usage.num_predicted
        details["rejected_prediction_tokens"] = usage.num_mispredicted
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_completion,
        "total_tokens": usage.num_prompt + usage.num_completion,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
        "completion_tokens_details": details,
    }


def error_event(error: Exception) -> bytes:
    """How a stream fails: its status has been sent, so the error is its last event."""
    return b"data: " + reply_to(error).body + b"\n\n"
