"""The JSON that answers: whole bodies, and a stream's chunks from templates made once a request.

A chunk is bytes that were put together at the request's start, around an escaped string: at a token
a chunk, encoding the object anew would cost more than all the rest of a stream.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from penstock.engine.client import ModelInfo
from penstock.server.api.openai.message_parts import delta_of, message_of
from penstock.server.errors import reply_to
from penstock.server.observability.version import version
from penstock.server.output.detokenizer import Vocabulary
from penstock.server.output.generation import LogprobEntry, Piece, Usage
from penstock.server.output.logprobs import EchoedToken, PositionLogprobs, finite
from penstock.server.output.parts import Part

_encode = msgspec.json.Encoder().encode


def system_fingerprint(info: ModelInfo) -> str:
    """Changes when what may change a seeded answer does."""
    return f"fp_penstock_{version()}_{info.architecture}_{info.dtype}_{info.device}"


class Reply(Protocol):
    """How one endpoint words its answers."""

    object: str
    chunk_object: str
    # Whether a choice's last text and its end share a chunk: in completions as at vLLM, whose
    # clients take each chunk for a token; not in chats, as at OpenAI.
    ends_with_text: bool

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A whole choice of a plain body."""
        ...

    def logprobs(
        self, entries: list[LogprobEntry], echoed: Sequence[EchoedToken] = ()
    ) -> dict[str, Any]: ...

    def add_prompts(self, body: dict[str, Any], prompts: list[list[PositionLogprobs]]) -> None:
        """vLLM's `prompt_logprobs`, where it has them. prompts: each choice's."""
        ...

    def head_extras(self) -> dict[str, Any]:
        """Of a body, or of a stream's openings, beside the choices."""
        ...

    def delta_extras(self, piece: Piece, is_first: bool) -> dict[str, Any]:
        """Of a choice's chunk. is_first: it has had none with text or ids before."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice's first chunk, where there is one before any text."""
        ...

    def delta(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the JSON string of a chunk's text."""
        ...

    def closing(self, index: int, finish_reason: str) -> dict[str, Any]:
        """A choice's last chunk, which has no text."""
        ...


class TokenExtras(NamedTuple):
    """What some clients want to know of tokens beyond their text.

    spells_ids: a token in logprobs is named "token_id:5" (vLLM's form), so that two tokens of one
    spelling can be told apart. prompt_ids: each choice's prompt; None where no ids were asked for.
    """

    spells_ids: bool = False
    prompt_ids: tuple[tuple[int, ...], ...] | None = None

    def name(self, token_id: int, spelling: bytes) -> str:
        return f"token_id:{token_id}" if self.spells_ids else spelling.decode(errors="replace")


_NO_EXTRAS = TokenExtras()


class ChatReply:
    """`/v1/chat/completions`."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    ends_with_text = False

    def __init__(
        self,
        vocabulary: Vocabulary,
        num_logprobs: int | None,
        extras: TokenExtras = _NO_EXTRAS,
    ) -> None:
        self._vocabulary = vocabulary
        self._num_logprobs = num_logprobs
        self._extras = extras

    def choice(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.parts is not None:
            message = message_of(piece.parts)
        choice = {
            "index": piece.choice,
            "message": message,
            "logprobs": None if self._num_logprobs is None else self.logprobs(piece.logprobs),
            "finish_reason": piece.finish_reason,
        }
        return choice | {"token_ids": piece.token_ids} if self._extras.prompt_ids else choice

    def head_extras(self) -> dict[str, Any]:
        prompts = self._extras.prompt_ids
        return {"prompt_token_ids": prompts[0]} if prompts else {}

    def delta_extras(self, piece: Piece, is_first: bool) -> dict[str, Any]:
        return {"token_ids": piece.token_ids} if self._extras.prompt_ids else {}

    def add_prompts(self, body: dict[str, Any], prompts: list[list[PositionLogprobs]]) -> None:
        body["prompt_logprobs"] = prompts[0]

    def logprobs(
        self, entries: list[LogprobEntry], echoed: Sequence[EchoedToken] = ()
    ) -> dict[str, Any]:
        """A chat's answer echoes nothing."""
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def opening(self, index: int) -> dict[str, Any] | None:
        return _chat_chunk(index, {"role": "assistant", "content": ""}, None)

    def delta(self, index: int) -> tuple[bytes, bytes]:
        return b'{"index":%d,"delta":{"content":' % index, b"}"

    def closing(self, index: int, finish_reason: str) -> dict[str, Any]:
        return _chat_chunk(index, {}, finish_reason)

    def _entry(self, entry: LogprobEntry) -> dict[str, Any]:
        top = entry.logprobs.top[: self._num_logprobs]
        return self._token(entry.token_id, entry.logprobs.logprob) | {
            "top_logprobs": [self._token(*pair) for pair in top]
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelling = self._vocabulary.spelling(token_id)
        return {
            "token": self._extras.name(token_id, spelling),
            "logprob": finite(logprob),
            "bytes": list(spelling),
        }


def _chat_chunk(index: int, delta: dict[str, str], finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


class CompletionReply:
    """`/v1/completions`."""

    object = "text_completion"
    chunk_object = "text_completion"
    ends_with_text = True

    def __init__(
        self,
        vocabulary: Vocabulary,
        num_logprobs: int | None,
        extras: TokenExtras = _NO_EXTRAS,
    ) -> None:
        self._vocabulary = vocabulary
        self._num_logprobs = num_logprobs
        self._extras = extras

    def choice(self, piece: Piece) -> dict[str, Any]:
        choice = {
            "index": piece.choice,
            "text": piece.text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
        }
        if self._num_logprobs is not None:
            choice["logprobs"] = self.logprobs(piece.logprobs, piece.echoed)
        return choice | self.delta_extras(piece, is_first=True)

    def head_extras(self) -> dict[str, Any]:
        return {}

    def delta_extras(self, piece: Piece, is_first: bool) -> dict[str, Any]:
        prompts = self._extras.prompt_ids
        if not prompts:
            return {}
        prompt = {"prompt_token_ids": prompts[piece.choice]} if is_first else {}
        return prompt | {"token_ids": piece.token_ids}

    def add_prompts(self, body: dict[str, Any], prompts: list[list[PositionLogprobs]]) -> None:
        for choice, prompt in zip(body["choices"], prompts, strict=True):
            choice["prompt_logprobs"] = prompt

    def logprobs(
        self, entries: list[LogprobEntry], echoed: Sequence[EchoedToken] = ()
    ) -> dict[str, Any]:
        """Those of the prompt, where it is echoed, and of the answer as one list."""
        tokens: list[LogprobEntry | EchoedToken] = [*echoed, *entries]
        return {
            "text_offset": [token.offset for token in tokens],
            "token_logprobs": [
                finite(token.logprobs.logprob) if token.logprobs else None for token in tokens
            ],
            "tokens": [self._spell(token.token_id) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def delta(self, index: int) -> tuple[bytes, bytes]:
        return b'{"index":%d,"text":' % index, b""

    def closing(self, index: int, finish_reason: str) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": finish_reason}

    def _top(self, token: LogprobEntry | EchoedToken) -> dict[str, float] | None:
        """The best, and the token itself besides, as OpenAI has it."""
        if token.logprobs is None:
            return None
        best = token.logprobs.top[: self._num_logprobs]
        top: dict[str, float] = {}
        for token_id, logprob in (*best, (token.token_id, token.logprobs.logprob)):
            # Halves of characters may be spelled alike: the best one stays, as whoever takes the
            # maximum expects.
            top.setdefault(self._spell(token_id), finite(logprob))
        return top

    def _spell(self, token_id: int) -> str:
        return self._extras.name(token_id, self._vocabulary.spelling(token_id))


class Envelope:
    """What is the same in a request's body and in all its chunks: id, time, model, fingerprint."""

    def __init__(self, ask_id: str, model: str, fingerprint: str) -> None:
        self._ask_id = ask_id
        self._created = int(time.time())
        self._model = model
        self._fingerprint = fingerprint

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._ask_id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }


def plain_body(
    envelope: Envelope,
    reply: Reply,
    pieces: list[Piece],
    usage: Usage,
    prompts: list[list[PositionLogprobs]] | None = None,
) -> bytes:
    """prompts: what is told of each choice's prompt, where that was asked for."""
    choices = [reply.choice(piece) for piece in pieces]
    body = {"choices": choices, "usage": usage_fields(usage), **reply.head_extras()}
    if prompts:
        reply.add_prompts(body, prompts)
    return _encode(envelope.head(reply.object) | body)


def usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_completion,
        "total_tokens": usage.num_prompt + usage.num_completion,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning},
    }


def error_event(error: Exception) -> bytes:
    """How a stream fails: its status has been sent, so the error is its last event."""
    return b"data: " + reply_to(error).body + b"\n\n"


class ChunkWriter:
    """One stream's chunks as SSE events."""

    def __init__(
        self,
        envelope: Envelope,
        reply: Reply,
        *,
        wants_usage: bool,
        running_usage: Usage | None = None,
    ) -> None:
        """running_usage: every chunk tells it, as it is then."""
        self._reply = reply
        self._wants_usage = wants_usage
        self._running_usage = running_usage
        # {"id":...,"model":...  with the brace left open
        self._head = b"data: " + _encode(envelope.head(reply.chunk_object))[:-1] + b',"choices":['
        self._no_usage = b',"usage":null' if wants_usage else b""
        self._plain_unended = b',"finish_reason":null}]' + self._no_usage + b"}\n\n"
        self._deltas: dict[int, tuple[bytes, bytes]] = {}

    def openings(self, num_choices: int) -> bytes:
        openings = (self._reply.opening(index) for index in range(num_choices))
        extras = self._reply.head_extras()
        after = b"," + _encode(extras)[1:-1] if extras else b""
        return b"".join(self._event(_encode(choice), after) for choice in openings if choice)

    def piece(self, piece: Piece) -> bytes:
        """Its text, if it has any, in one event, and its end there or in one of its own."""
        events, reason = b"", piece.finish_reason
        if piece.parts is not None:
            events = self._of_parts(piece, piece.parts)
        elif piece.text or piece.logprobs or piece.token_ids or piece.echoed:
            is_first = piece.choice not in self._deltas
            before, after = self._delta(piece.choice)
            logprobs = b"null"
            if piece.logprobs or piece.echoed:
                logprobs = _encode(self._reply.logprobs(piece.logprobs, piece.echoed))
            if piece.token_ids:
                extras = self._reply.delta_extras(piece, is_first)
                logprobs += b"," + _encode(extras)[1:-1]
            events = before + _encode(piece.text) + after + logprobs
            if reason and self._reply.ends_with_text:
                return events + self._ended(reason)
            events += self._unended()
        if reason:
            events += self._event(_encode(self._reply.closing(piece.choice, reason)))
        return events

    def _of_parts(self, piece: Piece, parts: Sequence[Part]) -> bytes:
        """An event for each part; what is known of the tokens goes with the first."""
        deltas = [delta_of(part) for part in parts]
        if not deltas and (piece.logprobs or piece.token_ids):
            deltas = [{}]
        logprobs = self._reply.logprobs(piece.logprobs) if piece.logprobs else None
        extras = self._reply.delta_extras(piece, False) if piece.token_ids else {}
        events = []
        for delta in deltas:
            choice = {"index": piece.choice, "delta": delta, "logprobs": logprobs}
            events.append(self._event(_encode(choice | {"finish_reason": None} | extras)))
            logprobs, extras = None, {}
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self._wants_usage:
            return done
        return self._head + b'],"usage":' + _encode(usage_fields(usage)) + b"}\n\n" + done

    def failure(self, error: Exception) -> bytes:
        return error_event(error)

    def _event(self, choice: bytes, extras: bytes = b"") -> bytes:
        return self._head + choice + b"]" + extras + self._usage() + b"}\n\n"

    def _unended(self) -> bytes:
        """What follows the logprobs of a chunk that is not the choice's last."""
        if self._running_usage is None:
            return self._plain_unended
        return b',"finish_reason":null}]' + self._usage() + b"}\n\n"

    def _ended(self, reason: str) -> bytes:
        return b',"finish_reason":' + _encode(reason) + b"}]" + self._usage() + b"}\n\n"

    def _usage(self) -> bytes:
        if self._running_usage is None:
            return self._no_usage
        return b',"usage":' + _encode(usage_fields(self._running_usage))

    def _delta(self, index: int) -> tuple[bytes, bytes]:
        """The bytes around a text of this choice, made at its first."""
        if index not in self._deltas:
            before, after = self._reply.delta(index)
            self._deltas[index] = self._head + before, after + b',"logprobs":'
        return self._deltas[index]
