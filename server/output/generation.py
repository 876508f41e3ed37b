"""From a request to its choices: submit, detokenize, watch for stop strings, count.

One straight story. Who hears it, a stream or a plain body, is not known here.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from penstock.engine.client import EngineClient, OutputStream, RequestRefused
from penstock.scheduler.errors import PenstockError
from penstock.scheduler.types import FinishReason, PromptOutput, RequestOutput, TokenLogprobs
from penstock.server.errors import GrammarFailed, RequestTimedOut
from penstock.server.observability.metrics import Metrics, RequestTimes
from penstock.server.observability.tracing import RequestTrace, TracedRequest
from penstock.server.output.detokenizer import StopScanner, TextDecoder, Vocabulary
from penstock.server.output.logprobs import EchoedToken, echoed_tokens
from penstock.server.output.parts import Part, TextPart, merged
from penstock.server.prompt.generation_request import Ask
from penstock.server.tools.chat_format import AnswerReader


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
    echoed: the prompt's tokens, in the first piece of an answer that begins with them and whose
    logprobs are asked for.
    """

    choice: int
    text: str
    logprobs: list[LogprobEntry]
    finish_reason: str | None
    token_ids: Sequence[int] = ()
    parts: Sequence[Part] | None = None
    echoed: Sequence[EchoedToken] = ()

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
        self._num_echoed = self._num_sent = len(echo)
        self._entries: list[LogprobEntry] = []  # of tokens whose text is held back
        self._echoed: Sequence[EchoedToken] = ()  # until they have been told
        self._shows_stop = False

    def echo_logprobs(self, echoed: Sequence[EchoedToken]) -> None:
        """To be told before its first token. The token that ends the answer is then told of too:
        evaluation harnesses take it that as many entries follow the prompt's as were sampled."""
        self._echoed, self._shows_stop = echoed, True

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
                start = self._num_echoed + self._decoder.token_start
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
            if self._shows_stop and output.logprobs:
                end = self._num_sent + len(text)
                self._entries.append(LogprobEntry(output.token_ids[-1], output.logprobs[-1], end))
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
        echoed, self._echoed = self._echoed, ()
        if self._token_ids is None and self._reader is None:
            return Piece(self.index, text, entries, reason, echoed=echoed)
        token_ids: Sequence[int] = ()
        if self._token_ids is not None:
            token_ids, self._token_ids = self._token_ids, []
        parts, self._parts = self._parts, []
        told = merged(parts) if self._reader else None
        return Piece(self.index, text, entries, reason, token_ids, told, echoed)

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
        trace: RequestTrace | None = None,
    ) -> None:
        """timeout_s: from the request's arrival to its last token. trace: told at the end."""
        self.ask = ask
        self._timeout_s = timeout_s
        self._trace = trace
        self.usage = Usage(sum(len(request.prompt_token_ids) for request in ask.requests))
        self._engine = engine
        self._metrics = metrics
        self._streams: list[OutputStream] = []
        self._times: list[RequestTimes] = []  # of each prompt
        self._prompts = {request.id: i for i, request in enumerate(ask.requests)}
        self._vocabulary = vocabulary
        self.choices: list[Choice] = []
        self.prompts: dict[int, PromptOutput] = {}  # what was asked of each prompt, when it is told
        self._num_open = 0
        self._time_is_up = False
        self._timer: asyncio.TimerHandle | None = None
        self._on_news: Callable[[], None] = _ignore
        self._outcome = "abandoned"  # until something else comes to pass

    def submit(self) -> None:
        """Hands all prompts to the engine, or none. Raises QueueFull, EngineFailed, or, for more
        answers than there ever is room for, RequestRefused."""
        num_asked, limit = sum(request.n for request in self.ask.requests), self._engine.max_open
        if num_asked > limit:
            raise RequestRefused(
                f"the request asks for {num_asked} answers, and this server holds {limit} at most; "
                "send fewer prompts at a time, or a lower n"
            )
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
            self._times.append(
                self._metrics.on_submit(request.id, num_prompt, self.ask.arrival_s, request.n)
            )
            self._metrics.answers_asked.observe(request.n)
            self._metrics.max_tokens_asked.observe(request.sampling.max_tokens)
            for _ in range(request.n):
                self.choices.append(self._choice(is_whole, echo))
        self._num_open = len(self.choices)

    def listen(self, on_news: Callable[[], None]) -> None:
        """Calls back, on the event loop, when `take` may have news. It must not raise."""
        self._on_news = on_news
        for stream in self._streams:
            stream.listen(on_news)
        if self._timeout_s is not None and self._timer is None:
            left_s = self.ask.arrival_s + self._timeout_s - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(left_s, self._end_in_time)

    def take(self) -> list[Piece]:
        """All that is new, perhaps nothing. Raises what ended it early: the engine's error, or
        RequestTimedOut. To stop before `has_ended`, call `close`."""
        try:
            if self._time_is_up:
                assert self._timeout_s is not None
                raise RequestTimedOut(self._timeout_s)
            pieces = []
            for stream in self._streams:
                if outputs := stream.take():
                    pieces += self._take_all(outputs)
        except Exception:
            self._outcome = "failed"
            raise
        if not self._num_open:
            reasons = {choice.finish_reason for choice in self.choices}
            self._outcome = "length" if "length" in reasons else "stop"
        return pieces

    @property
    def has_ended(self) -> bool:
        """All choices have: `take` gave their last pieces."""
        if not self._num_open:
            return True
        return not (self._streams[0].num_open or self._time_is_up) and all(
            stream.is_over for stream in self._streams
        )

    @property
    def num_waiting(self) -> int:
        """Outputs of the engine that `take` would take."""
        return sum(stream.num_waiting for stream in self._streams)

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """All that is new at each look, for who need not `listen`."""
        news = asyncio.Event()
        self.listen(news.set)
        while True:
            news.clear()
            if pieces := self.take():
                yield pieces
            if self.has_ended:
                return
            await news.wait()

    def close(self) -> None:
        """To be called once, however it ended: what still runs is aborted, the outcome counted."""
        self._on_news = _ignore
        for stream in self._streams:
            stream.listen(_ignore)
        if self._timer:
            self._timer.cancel()
        self._abort()
        for request in self.ask.requests:
            self._metrics.forget(request.id)
        self._metrics.outcomes[self._outcome] += 1
        if self._outcome in ("stop", "length"):
            self._metrics.latency.observe(time.monotonic() - self.ask.arrival_s)
        if self._trace:
            self._trace.end(self._traced())

    def _traced(self) -> TracedRequest:
        begun = [choice for choice in self.choices if choice.num_tokens]
        started = [self.started_s(choice) for choice in self.choices]
        return TracedRequest(
            id=self.ask.id,
            operation="text_completion" if self.ask.id.startswith("cmpl") else "chat",
            sampling=self.ask.requests[0].sampling,
            num_choices=len(self.choices),
            arrival_s=self.ask.arrival_s,
            started_s=min((s for s in started if s is not None), default=None),
            first_token_s=min((choice.first_token_s for choice in begun), default=None),
            last_token_s=max((choice.last_token_s for choice in begun), default=None),
            num_prompt_tokens=self.usage.num_prompt,
            num_cached_tokens=self.usage.num_cached,
            num_output_tokens=self.usage.num_completion,
            finish_reasons=tuple(c.finish_reason for c in self.choices if c.finish_reason),
            outcome=self._outcome,
        )

    def started_s(self, choice: Choice) -> float | None:
        """When it had its first step, in time.monotonic()."""
        prompt, index = divmod(choice.index, self.ask.n)
        return self._times[prompt].started_s[index]

    def _end_in_time(self) -> None:
        """The next `take` says so; until then the engine need not go on."""
        self._time_is_up = True
        self._abort()
        self._on_news()

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
        gaps = self._metrics.gaps
        pieces = []
        for output in outputs:
            prompt = self._prompts[output.request_id]
            if output.prompt is not None:
                self._take_prompt(prompt, output.prompt)
            choice = self.choices[prompt * self.ask.n + output.index]
            if choice.finish_reason:
                continue  # it came behind a stop string
            num_before = choice.num_tokens
            piece = choice.take(output)
            num_new = choice.num_tokens - num_before
            self.usage.num_completion += num_new
            if num_new == 1 and choice.last_token_s:  # as most are, so it must cost little
                gaps.since_s.append(choice.last_token_s)
                choice.last_token_s = gaps.now_s
            elif num_new:
                self._observe(choice, num_new)
            if choice.finish_reason:
                self._end(choice, output)
            if piece:
                pieces.append(piece)
        return _coalesced(pieces)

    def _take_prompt(self, prompt: int, told: PromptOutput) -> None:
        """It comes before anything else of this prompt's answers."""
        self.prompts[prompt] = told
        if self.ask.echoes_logprobs:
            assert told.logprobs is not None
            token_ids = self.ask.requests[prompt].prompt_token_ids
            echoed = echoed_tokens(self._vocabulary, token_ids, told.logprobs)
            for choice in self.choices[prompt * self.ask.n : (prompt + 1) * self.ask.n]:
                choice.echo_logprobs(echoed)

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
        if choice.num_tokens:
            self._metrics.decode_time.observe(choice.last_token_s - choice.first_token_s)
            self._metrics.answer_lengths.observe(choice.num_tokens)
            if (started_s := self.started_s(choice)) is not None:
                self._metrics.inference_time.observe(choice.last_token_s - started_s)

    def _observe(self, choice: Choice, num_tokens: int) -> None:
        """Its first, or several at once."""
        gaps = self._metrics.gaps
        if choice.last_token_s:
            gaps.add_spread(choice.last_token_s, num_tokens)
        else:
            self._observe_first(choice)
            choice.first_token_s = gaps.now_s
        choice.last_token_s = gaps.now_s

    def _observe_first(self, choice: Choice) -> None:
        now_s = time.monotonic()  # later than gaps.now_s by the turns of the streams before it
        self._metrics.ttft.observe(now_s - self.ask.arrival_s)
        if (started_s := self.started_s(choice)) is not None:
            self._metrics.prefill_time.observe(now_s - started_s)


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
    last, echoed = pieces[-1], pieces[0].echoed
    return Piece(last.choice, text, logprobs, last.finish_reason, token_ids, parts, echoed)


def _ignore() -> None:
    """Nobody listens."""
