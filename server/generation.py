"""From a request to its choices: submit, detokenize, watch for stop strings, count.

One straight story. Who hears it, a stream or a plain body, is not known here.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from engine.client import EngineClient, OutputStream
from scheduler.errors import PenstockError
from scheduler.types import FinishReason, RequestOutput, TokenLogprobs
from server.ask import Ask
from server.chat_format import AnswerReader
from server.detokenizer import StopScanner, TextDecoder, Vocabulary
from server.errors import GrammarFailed, RequestTimedOut
from server.metrics import Metrics
from server.parts import Part, TextPart, merged


class LogprobEntry(NamedTuple):
    """One token of a choice. offset: where in the choice's text it begins, in characters."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int


class Piece(NamedTuple):
    """What is new of one choice. finish_reason is None but in its last piece.

    finish_reason: "stop", "length", or "tool_calls" where it ended with calls.
    token_ids: empty unless the client asked for them; else all that were sampled, the stop's too.
    parts: what the text consists of, for an answer that may have calls or thoughts; else None.
    """

    choice: int
    text: str
    logprobs: list[LogprobEntry]
    finish_reason: str | None
    token_ids: Sequence[int] = ()
    parts: Sequence[Part] | None = None

    @property
    def all_parts(self) -> Sequence[Part]:
        """The parts, or the one that it is where the whole answer is plain text."""
        if self.parts is not None:
            return self.parts
        return (TextPart(self.text),) if self.text or self.logprobs else ()


@dataclass(slots=True)
class Usage:
    """num_cached: prompt tokens that prefix hits spared. num_reasoning: of the completion's."""

    num_prompt: int
    num_completion: int = 0
    num_cached: int = 0
    num_reasoning: int = 0


class Choice:
    """One answer in the making: ids in, text out, until the engine or a stop string ends it."""

    def __init__(
        self,
        index: int,
        decoder: TextDecoder,
        scanner: StopScanner | None,
        includes_stop: bool,
        *,
        echo: str = "",
        min_tokens: int = 0,
        wants_token_ids: bool = False,
        reader: AnswerReader | None = None,
    ) -> None:
        """See `Ask` for the last four."""
        self.index = index
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.has_stop_string = False
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self._decoder = decoder
        self._scanner = scanner
        self._includes_stop = includes_stop
        self._echo = echo  # until it has been told
        self._min_tokens = min_tokens
        self._token_ids: list[int] | None = [] if wants_token_ids else None  # those not yet told
        self.num_reasoning = 0
        self._reader = reader
        self._parts: list[Part] = []  # those not yet told
        self._num_sent = 0
        self._entries: list[LogprobEntry] = []  # of tokens whose text is held back

    def take(self, output: RequestOutput) -> Piece | None:
        """Takes new ids in; None where there is nothing to tell of yet."""
        shown_ids = output.token_ids
        if output.finish and output.finish.stop_token_id is not None and not self._includes_stop:
            shown_ids = shown_ids[:-1]  # it counts, and is not seen
        text = ""
        for i, token_id in enumerate(shown_ids):
            self.num_tokens += 1
            if self._token_ids is not None:
                self._token_ids.append(token_id)
            new = self._pass(self._decoder.feed(token_id))
            text += new
            if output.logprobs:
                start = self._decoder.token_start
                self._entries.append(LogprobEntry(token_id, output.logprobs[i], start))
            if self._reader:
                self._read(self._reader, new)
                if self._reader.is_over:
                    return self._finish(text, "stop")
            if self.has_stop_string:
                return self._finish(text, "stop")
        if len(shown_ids) < len(output.token_ids):
            self.num_tokens += 1
            if self._token_ids is not None:
                self._token_ids.append(output.token_ids[-1])
        if output.finish:
            if output.finish.reason is FinishReason.ERROR:
                raise GrammarFailed
            rest = self._pass(self._decoder.end())
            if self._scanner and not self.has_stop_string:
                rest += self._scanner.end()
            if self._reader:
                self._parts += self._reader.feed(rest)
            text += rest
            reason = "stop" if self.has_stop_string else output.finish.reason.value
            return self._finish(text, reason)
        if not text:
            return None
        self._num_sent += len(text)
        entries = self._take_entries()
        if self._reader and not (self._parts or entries or self._token_ids):
            return None  # it holds back what may be markup
        return self._piece(text, entries, None)

    def _piece(self, text: str, entries: list[LogprobEntry], reason: str | None) -> Piece:
        if self._echo:
            text, self._echo = self._echo + text, ""
        if self._token_ids is None and self._reader is None:
            return Piece(self.index, text, entries, reason)
        token_ids: Sequence[int] = ()
        if self._token_ids is not None:
            token_ids, self._token_ids = self._token_ids, []
        parts, self._parts = self._parts, []
        told = merged(parts) if self._reader else None
        return Piece(self.index, text, entries, reason, token_ids, told)

    def _read(self, reader: AnswerReader, text: str) -> None:
        """What one token adds. It is one of the thoughts if these go on behind it."""
        was_thinking = reader.is_thinking
        self._parts += reader.feed(text)
        self.num_reasoning += was_thinking and reader.is_thinking

    @property
    def stop_string(self) -> str | None:
        """The one that ended it, if one did."""
        return self._scanner.stop if self._scanner else None

    def _pass(self, text: str) -> str:
        """Through the scanner, where there is one."""
        if self._scanner is None or not text or self.num_tokens <= self._min_tokens:
            return text
        text = self._scanner.feed(text)
        self.has_stop_string = self._scanner.has_stopped
        return text

    def _finish(self, text: str, reason: str) -> Piece:
        if self._reader:
            self._parts += self._reader.end()
            if self._reader.has_calls and reason == "stop":
                reason = "tool_calls"
        self.finish_reason = reason
        self._num_sent += len(text)
        entries = self._take_entries() if self.has_stop_string else self._entries
        return self._piece(text, entries, reason)

    def _take_entries(self) -> list[LogprobEntry]:
        """Those of the tokens whose text has been sent, in part at least."""
        if not self._entries:
            return []
        num_ready = sum(entry.offset < self._num_sent for entry in self._entries)
        entries, self._entries = self._entries[:num_ready], self._entries[num_ready:]
        return entries


class Generation:
    """One HTTP request's choices. `submit` or be refused, read `pieces`; then `usage` holds."""

    def __init__(
        self,
        ask: Ask,
        engine: EngineClient,
        vocabulary: Vocabulary,
        metrics: Metrics,
        timeout_s: float | None = None,
    ) -> None:
        """timeout_s: from the request's arrival to its last token."""
        self.ask = ask
        self._timeout_s = timeout_s
        self.usage = Usage(sum(len(request.prompt_token_ids) for request in ask.requests))
        self._engine = engine
        self._metrics = metrics
        self._streams: list[OutputStream] = []
        self._prompts = {request.id: i for i, request in enumerate(ask.requests)}
        self._vocabulary = vocabulary
        self.choices: list[Choice] = []
        self._num_open = 0
        self._outcome = "abandoned"  # until something else comes to pass

    def submit(self) -> None:
        """Hands all prompts to the engine, or none. Raises QueueFull or EngineFailed."""
        try:
            for request in self.ask.requests:
                self._streams.append(self._engine.submit(request))
        except PenstockError:
            self._abort()
            raise
        for i, (request, is_whole) in enumerate(
            zip(self.ask.requests, self.ask.are_whole, strict=True)
        ):
            echo = self.ask.echoes[i] if self.ask.echoes else ""
            num_prompt = len(request.prompt_token_ids)
            self._metrics.on_submit(request.id, num_prompt, self.ask.arrival_s)
            for _ in range(request.n):
                self.choices.append(self._choice(is_whole, echo))
        self._num_open = len(self.choices)

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """All that is new at each look. To stop early, call `close`; raises what the engine did."""
        try:
            coming = _merged(self._streams)
            if self._timeout_s is not None:
                coming = _in_time(coming, self.ask.arrival_s, self._timeout_s)
            async with aclosing(coming) as merged:
                async for outputs in merged:
                    pieces = self._take_all(outputs)
                    if pieces:
                        yield pieces
                    if not self._num_open:
                        break
        except Exception:
            self._outcome = "failed"
            for request in self.ask.requests:
                self._metrics.on_failure(request.id)
            raise
        reasons = {choice.finish_reason for choice in self.choices}
        self._outcome = "length" if "length" in reasons else "stop"

    def close(self) -> None:
        """To be called once, however it ended: what still runs is aborted, the outcome counted."""
        self._abort()
        self._metrics.outcomes[self._outcome] += 1
        if self._outcome in ("stop", "length"):
            self._metrics.latency.observe(time.monotonic() - self.ask.arrival_s)

    def _abort(self) -> None:
        for request, _ in zip(self.ask.requests, self._streams, strict=False):
            self._engine.abort(request.id)  # harmless where it has ended

    def _choice(self, is_whole: bool, echo: str) -> Choice:
        ask = self.ask
        decoder = TextDecoder(
            self._vocabulary,
            is_whole=is_whole,
            shows_special=ask.shows_special,
            shown=ask.markup,
        )
        includes = ask.includes_stop
        return Choice(
            len(self.choices),
            decoder,
            StopScanner(ask.stops, includes_stop=includes) if ask.stops else None,
            includes,
            echo=echo,
            min_tokens=ask.min_tokens,
            wants_token_ids=ask.wants_token_ids,
            reader=ask.make_reader() if ask.make_reader else None,
        )

    def _take_all(self, outputs: list[RequestOutput]) -> list[Piece]:
        now_s = time.monotonic()
        pieces = []
        for output in outputs:
            prompt = self._prompts[output.request_id]
            choice = self.choices[prompt * self.ask.n + output.index]
            if choice.finish_reason:
                continue  # it came behind a stop string
            num_before = choice.num_tokens
            piece = choice.take(output)
            self.usage.num_completion += choice.num_tokens - num_before
            self._observe(choice, choice.num_tokens - num_before, now_s)
            if choice.finish_reason:
                self._end(choice, output)
            if piece:
                pieces.append(piece)
        return _coalesced(pieces)

    def _end(self, choice: Choice, output: RequestOutput) -> None:
        self._num_open -= 1
        self.usage.num_reasoning += choice.num_reasoning
        if output.index == 0:  # the other samples of a prompt share the blocks of the first
            self.usage.num_cached += output.num_cached_tokens
        if not output.finish:  # a stop string: only we know
            self._engine.abort(output.request_id, output.index)
        if choice.num_tokens > 1:
            span_s = choice.last_token_s - choice.first_token_s
            self._metrics.tpot.observe(span_s / (choice.num_tokens - 1))

    def _observe(self, choice: Choice, num_tokens: int, now_s: float) -> None:
        if not num_tokens:
            return
        if not choice.first_token_s:
            choice.first_token_s = now_s
            self._metrics.ttft.observe(now_s - self.ask.arrival_s)
        else:
            gap_s = (now_s - choice.last_token_s) / num_tokens
            self._metrics.itl.observe(gap_s, num_tokens)
        choice.last_token_s = now_s


async def collected(generation: Generation) -> list[Piece]:
    """All choices, each as one whole piece, in order."""
    parts: list[list[Piece]] = [[] for _ in generation.choices]
    async with aclosing(generation.pieces()) as news:
        async for pieces in news:
            for piece in pieces:
                parts[piece.choice].append(piece)
    return [_joined(of_choice) for of_choice in parts]


def _coalesced(pieces: list[Piece]) -> list[Piece]:
    """One piece a choice: a reader that has fallen behind gets all that waits at once."""
    if len(pieces) < 2:
        return pieces
    by_choice: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_choice.setdefault(piece.choice, []).append(piece)
    return [_joined(of_choice) for of_choice in by_choice.values()]


def _joined(pieces: list[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    text = "".join(piece.text for piece in pieces)
    logprobs = [entry for piece in pieces for entry in piece.logprobs]
    token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
    parts = None
    if pieces[-1].parts is not None:
        parts = merged(part for piece in pieces for part in piece.parts or ())
    return Piece(pieces[-1].choice, text, logprobs, pieces[-1].finish_reason, token_ids, parts)


async def _merged(streams: list[OutputStream]) -> AsyncGenerator[list[RequestOutput], None]:
    """The outputs of all streams as they come. One stream, the usual case, needs no tasks."""
    if len(streams) == 1:
        async for outputs in streams[0]:
            yield outputs
        return
    queue: asyncio.Queue[list[RequestOutput] | PenstockError | None] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    num_open = len(streams)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, PenstockError):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()


async def _in_time(
    outputs: AsyncGenerator[list[RequestOutput], None], arrival_s: float, timeout_s: float
) -> AsyncGenerator[list[RequestOutput], None]:
    """The same, until the time is up: then RequestTimedOut."""
    async with aclosing(outputs):
        while True:
            try:
                async with asyncio.timeout(arrival_s + timeout_s - time.monotonic()):
                    news = await anext(outputs)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise RequestTimedOut(timeout_s) from error
            yield news


async def _pump(
    stream: OutputStream, queue: asyncio.Queue[list[RequestOutput] | PenstockError | None]
) -> None:
    try:
        async for outputs in stream:
            queue.put_nowait(outputs)
        queue.put_nowait(None)
    except PenstockError as error:
        queue.put_nowait(error)
