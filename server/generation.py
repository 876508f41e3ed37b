"""From a request to its choices: submit, detokenize, watch for stop strings, count.

One straight story. Who hears it, a stream or a plain body, is not known here.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from engine.client import EngineClient, OutputStream
from scheduler.errors import PenstockError
from scheduler.types import RequestOutput, TokenLogprobs
from server.ask import Ask
from server.detokenizer import StopScanner, TextDecoder, Vocabulary
from server.metrics import Metrics


class LogprobEntry(NamedTuple):
    """One token of a choice. offset: where in the choice's text it begins, in characters."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int


class Piece(NamedTuple):
    """What is new of one choice. finish_reason: "stop" or "length" in its last piece, else None."""

    choice: int
    text: str
    logprobs: list[LogprobEntry]
    finish_reason: str | None


@dataclass(slots=True)
class Usage:
    """num_cached: prompt tokens that prefix hits spared."""

    num_prompt: int
    num_completion: int = 0
    num_cached: int = 0


class Choice:
    """One answer in the making: ids in, text out, until the engine or a stop string ends it."""

    def __init__(
        self, index: int, decoder: TextDecoder, scanner: StopScanner | None, includes_stop: bool
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.has_stop_string = False
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self._decoder = decoder
        self._scanner = scanner
        self._includes_stop = includes_stop
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
            text += self._pass(self._decoder.feed(token_id))
            if output.logprobs:
                start = self._decoder.token_start
                self._entries.append(LogprobEntry(token_id, output.logprobs[i], start))
            if self.has_stop_string:
                return self._finish(text, "stop")
        self.num_tokens += len(output.token_ids) - len(shown_ids)
        if output.finish:
            text += self._pass(self._decoder.end())
            if self._scanner and not self.has_stop_string:
                text += self._scanner.end()
            reason = "stop" if self.has_stop_string else output.finish.reason.value
            return self._finish(text, reason)
        if not text:
            return None
        self._num_sent += len(text)
        return Piece(self.index, text, self._take_entries(), None)

    def _pass(self, text: str) -> str:
        """Through the scanner, where there is one."""
        if self._scanner is None or not text:
            return text
        text = self._scanner.feed(text)
        self.has_stop_string = self._scanner.has_stopped
        return text

    def _finish(self, text: str, reason: str) -> Piece:
        self.finish_reason = reason
        self._num_sent += len(text)
        entries = self._take_entries() if self.has_stop_string else self._entries
        return Piece(self.index, text, entries, reason)

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
        self, ask: Ask, engine: EngineClient, vocabulary: Vocabulary, metrics: Metrics
    ) -> None:
        self.ask = ask
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
        for request, is_whole in zip(self.ask.requests, self.ask.are_whole, strict=True):
            num_prompt = len(request.prompt_token_ids)
            self._metrics.on_submit(request.id, num_prompt, self.ask.arrival_s)
            for _ in range(request.n):
                self.choices.append(self._choice(is_whole))
        self._num_open = len(self.choices)

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """All that is new at each look. To stop early, call `close`; raises what the engine did."""
        try:
            async with aclosing(_merged(self._streams)) as merged:
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

    def _choice(self, is_whole: bool) -> Choice:
        decoder = TextDecoder(self._vocabulary, is_whole=is_whole)
        includes = self.ask.includes_stop
        scanner = StopScanner(self.ask.stops, includes_stop=includes) if self.ask.stops else None
        return Choice(len(self.choices), decoder, scanner, includes)

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
            self._observe(choice, choice.num_tokens - num_before, now_s)
            if choice.finish_reason:
                self._end(choice, output)
            if piece:
                pieces.append(piece)
        return _coalesced(pieces)

    def _end(self, choice: Choice, output: RequestOutput) -> None:
        self._num_open -= 1
        self.usage.num_completion += choice.num_tokens
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
    return Piece(pieces[-1].choice, text, logprobs, pieces[-1].finish_reason)


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


async def _pump(
    stream: OutputStream, queue: asyncio.Queue[list[RequestOutput] | PenstockError | None]
) -> None:
    try:
        async for outputs in stream:
            queue.put_nowait(outputs)
        queue.put_nowait(None)
    except PenstockError as error:
        queue.put_nowait(error)
