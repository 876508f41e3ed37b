"""`GenerationRequest`, all that a request asks for once its wire format no longer matters, and
`Generation`, from it to its choices: submit, detokenize, stop, count.

Whether the deltas end in a stream or in one body is not known here.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penstock.engine.client import EngineClient, OutputStream
from penstock.scheduler.errors import TargetOutOfReach
from penstock.scheduler.types import PromptOutput, Request, RequestOutput, ResumedAnswer
from penstock.server.errors import InvalidRequest, RequestTimedOut
from penstock.server.observability.metrics import Metrics, RequestTimes
from penstock.server.observability.request_log import EndedRequest
from penstock.server.observability.traffic_record import TrafficRecord
from penstock.server.output.choice import Choice
from penstock.server.output.delta import OutputDelta, Usage, coalesced, joined
from penstock.server.output.detokenizer import StopScanner, StopStrings, TextDecoder, Vocabulary
from penstock.server.output.logprobs import EchoedTokens
from penstock.server.output.loops import LoopDetector, LoopRule
from penstock.server.output.parts import AnswerReader


class SentAnswers(NamedTuple):
    """The answers to a prompt that another server has begun to send, by index. token_ids: of each,
    as far as the client has them. ended: why, of those that have."""

    token_ids: Mapping[int, tuple[int, ...]]
    ended: Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One HTTP request to the engine: a `Request` for each prompt, `n` answers to each.

    are_whole: for each prompt, whether its answers are texts of their own (see `TextDecoder`).
    echoes: for each prompt, the text that its answers begin with; empty for none.
    echoes_logprobs: their logprobs begin with the prompt's too.
    tpot_target_s: what the TPOT of its answers is held against.
    min_tokens: a stop string is looked for only after this many. shows_special: special tokens
    appear in the text, by name.
    loop: when an answer repeats itself, which ends it; None: it may.
    make_reader: makes a reader for each answer; None if all of it is plain text. markup: the
    special tokens that the reader must see, id -> text.
    sent: of a request with one prompt that goes on here; None for one that starts here.
    Choices are numbered prompt by prompt: choice = prompt * n + sample.
    """

    id: str
    requests: tuple[Request, ...]
    are_whole: tuple[bool, ...]
    n: int
    stops: StopStrings | None
    includes_stop: bool
    arrival_s: float
    tpot_target_s: float | None = None
    echoes: tuple[str, ...] = ()
    echoes_logprobs: bool = False
    min_tokens: int = 0
    shows_special: bool = False
    wants_token_ids: bool = False
    loop: LoopRule | None = None
    make_reader: Callable[[], AnswerReader] | None = None
    markup: Mapping[int, str] = field(default_factory=dict)
    sent: SentAnswers | None = None

    @property
    def prompt_token_ids(self) -> list[tuple[int, ...]]:
        return [request.prompt_token_ids for request in self.requests]


class Generation:
    """One HTTP request's choices. Call `submit`, and `take` until `has_ended`; then `usage` is
    complete."""

    def __init__(
        self,
        request: GenerationRequest,
        engine: EngineClient,
        vocabulary: Vocabulary,
        metrics: Metrics,
        timeout_s: float | None = None,
        on_end: Callable[[EndedRequest], None] | None = None,
        traffic: TrafficRecord | None = None,
    ) -> None:
        """timeout_s: from the request's arrival to its last token. on_end: called in `close`."""
        self._traffic = traffic
        self.request = request
        self._timeout_s = timeout_s
        self._on_end = on_end
        self.usage = Usage(sum(len(request.prompt_token_ids) for request in request.requests))
        if request.requests[0].prediction:
            self.usage.num_predicted = 0
        self._engine = engine
        self._metrics = metrics
        self._streams: list[OutputStream] = []
        self._times: list[RequestTimes] = []  # of each prompt
        self._prompts = {request.id: i for i, request in enumerate(request.requests)}
        self._vocabulary = vocabulary
        self.choices: list[Choice] = []
        self.prompts: dict[int, PromptOutput] = {}  # outputs of each prompt, as they arrive
        self.replayed: list[OutputDelta] = []
        """The text that another server has sent of the answers that go on here."""
        self._num_open = 0
        self._time_is_up = False
        self._timer: asyncio.TimerHandle | None = None
        self._on_news: Callable[[], None] = _ignore
        self._outcome = "abandoned"  # until something else happens

    def submit(self) -> None:
        """Submits all prompts to the engine, or none. Raises QueueFull, EngineFailed, or, for more
        answers than the server can ever hold, RequestRefused."""
        sent = self.request.sent
        if sent is None:
            self._streams = self._engine.submit_alike(self.request.requests)
        else:
            self._resume(sent)
        for i, (request, is_whole) in enumerate(
            zip(self.request.requests, self.request.are_whole, strict=True)
        ):
            echo = self.request.echoes[i] if self.request.echoes else ""
            num_prompt = len(request.prompt_token_ids)
            self._times.append(
                self._metrics.on_submit(request.id, num_prompt, self.request.arrival_s, request.n)
            )
            self._metrics.answers_per_prompt.observe(request.n)
            self._metrics.max_tokens.observe(request.sampling.max_tokens)
            if sent is None:
                for _ in range(request.n):
                    self.choices.append(self._choice(is_whole, echo))
        self._num_open = sum(choice.finish_reason is None for choice in self.choices)

    def _resume(self, sent: SentAnswers) -> None:
        """Submits what is left to do of a request that another server began, after its answers have
        become what they were there. Raises InvalidRequest if that is not possible."""
        (request,), (is_whole,) = self.request.requests, self.request.are_whole
        now_s = time.monotonic()
        for index in range(request.n):
            # No echo: it has been sent.
            choice = self._choice(is_whole, "")
            self.choices.append(choice)
            ids = list(sent.token_ids[index])
            reason = sent.ended.get(index)
            delta = choice.take(RequestOutput(request.id, index, ids, None, None, 0))
            if reason is None and (choice.finish_reason or len(ids) >= request.sampling.max_tokens):
                message = f"answer {index} ends with its token_ids; give its finish_reason"
                raise InvalidRequest(message, param="answers")
            if reason is not None:
                choice.finish_reason = reason
            elif delta:
                self.replayed.append(delta)
            choice.first_token_s = choice.last_token_s = now_s
            self.usage.num_completion += choice.num_tokens
        resumed = tuple(
            ResumedAnswer(index, ids, now_s)
            for index, ids in sent.token_ids.items()
            if index not in sent.ended
        )
        self._streams = self._engine.submit_alike([replace(request, resumed=resumed)])

    async def accepted(self) -> None:
        """Returns when the engine has accepted all requests that have a target by which it may
        refuse them. Raises TargetOutOfReach, and what `take` raises."""
        try:
            for stream in self._streams:
                await stream.accepted()
        except TargetOutOfReach:
            self._outcome = "refused"
            self._metrics.predictions.targets["ttft", "refused"] += 1
            raise

    def listen(self, on_news: Callable[[], None]) -> None:
        """Calls back, on the event loop, when `take` may have news. It must not raise."""
        self._on_news = on_news
        for stream in self._streams:
            stream.listen(on_news)
        if self._timeout_s is not None and self._timer is None:
            left_s = self.request.arrival_s + self._timeout_s - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(left_s, self._end_in_time)

    def take(self) -> list[OutputDelta]:
        """All that is new, perhaps nothing. Raises what ended it early: the engine's error, or
        RequestTimedOut. To stop before `has_ended`, call `close`."""
        try:
            if self._time_is_up:
                assert self._timeout_s is not None
                raise RequestTimedOut(self._timeout_s)
            deltas = []
            for stream in self._streams:
                if outputs := stream.take():
                    deltas += self._take_all(outputs)
        except Exception:
            self._outcome = "failed"
            raise
        if not self._num_open:
            reasons = {choice.finish_reason for choice in self.choices}
            self._outcome = "length" if "length" in reasons else "stop"
        return deltas

    @property
    def has_ended(self) -> bool:
        """All choices have: `take` gave their last deltas."""
        if not self._num_open:
            return True
        return not (self._streams[0].num_open or self._time_is_up) and all(
            stream.is_over for stream in self._streams
        )

    @property
    def num_waiting(self) -> int:
        """Outputs of the engine that `take` would take."""
        return sum(stream.num_waiting for stream in self._streams)

    def close(self) -> None:
        """Call it once, however it ended: aborts what still runs, counts the outcome."""
        self._on_news = _ignore
        for stream in self._streams:
            stream.listen(_ignore)
        if self._timer:
            self._timer.cancel()
        self._abort()
        for request in self.request.requests:
            self._metrics.forget(request.id)
        self._metrics.outcomes[self._outcome] += 1
        if self._outcome in ("stop", "length"):
            self._metrics.latency.observe(time.monotonic() - self.request.arrival_s)
        if self._on_end:
            self._on_end(self._ended())
        if self._traffic:
            self._record(self._traffic)

    def _record(self, traffic: TrafficRecord) -> None:
        age_s = time.monotonic() - self.request.arrival_s
        for choice in self.choices:
            if choice.num_tokens:
                request = self.request.requests[choice.index // self.request.n]
                traffic.add(
                    request.prompt_token_ids,
                    num_output_tokens=choice.num_tokens,
                    tenant=request.tenant,
                    priority=request.priority,
                    age_s=age_s,
                )

    def _ended(self) -> EndedRequest:
        span_s = sum(choice.last_token_s - choice.first_token_s for choice in self.choices)
        num_gaps = sum(max(0, choice.num_tokens - 1) for choice in self.choices)
        begun = [choice for choice in self.choices if choice.num_tokens]
        started = [self.started_s(choice) for choice in self.choices]
        return EndedRequest(
            id=self.request.id,
            operation="text_completion" if self.request.id.startswith("cmpl") else "chat",
            sampling=self.request.requests[0].sampling,
            num_choices=len(self.choices),
            arrival_s=self.request.arrival_s,
            started_s=min((s for s in started if s is not None), default=None),
            first_token_s=min((choice.first_token_s for choice in begun), default=None),
            last_token_s=max((choice.last_token_s for choice in begun), default=None),
            tpot_s=span_s / num_gaps if num_gaps else None,
            num_prompt_tokens=self.usage.num_prompt,
            num_cached_tokens=self.usage.num_cached,
            num_output_tokens=self.usage.num_completion,
            finish_reasons=tuple(c.finish_reason for c in self.choices if c.finish_reason),
            outcome=self._outcome,
        )

    def started_s(self, choice: Choice) -> float | None:
        """When it had its first step, in time.monotonic()."""
        prompt, index = divmod(choice.index, self.request.n)
        return self._times[prompt].started_s[index]

    def _end_in_time(self) -> None:
        """The next `take` raises; until then the engine need not continue."""
        self._time_is_up = True
        self._abort()
        self._on_news()

    def _abort(self) -> None:
        for request, _ in zip(self.request.requests, self._streams, strict=False):
            self._engine.streams.abort(request.id)  # harmless where it has ended

    def _choice(self, is_whole: bool, echo: str) -> Choice:
        request = self.request
        decoder = TextDecoder(
            self._vocabulary,
            is_whole=is_whole,
            shows_special=request.shows_special,
            shown=request.markup,
        )
        includes = request.includes_stop
        return Choice(
            len(self.choices),
            decoder,
            StopScanner(request.stops, includes_stop=includes) if request.stops else None,
            includes,
            echo=echo,
            min_tokens=request.min_tokens,
            wants_token_ids=request.wants_token_ids,
            reader=request.make_reader() if request.make_reader else None,
            loop=LoopDetector(request.loop) if request.loop else None,
        )

    def _take_all(self, outputs: list[RequestOutput]) -> list[OutputDelta]:
        gaps = self._metrics.gaps
        deltas = []
        for output in outputs:
            prompt = self._prompts[output.request_id]
            if output.prompt is not None:
                self._take_prompt(prompt, output.prompt)
            choice = self.choices[prompt * self.request.n + output.index]
            if choice.finish_reason:
                continue  # it came after a stop string
            num_before = choice.num_tokens
            delta = choice.take(output)
            num_new = choice.num_tokens - num_before
            self.usage.num_completion += num_new
            if output.predicted is not None:
                accepted, rejected = output.predicted
                self.usage.num_predicted = (self.usage.num_predicted or 0) + accepted
                self.usage.num_mispredicted += rejected
            if num_new == 1 and choice.last_token_s:  # the usual case, so it must cost little
                gaps.since_s.append(choice.last_token_s)
                choice.last_token_s = gaps.now_s
            elif num_new:
                self._observe(choice, num_new)
            if choice.finish_reason:
                self._end(choice, output)
            if delta:
                deltas.append(delta)
        return coalesced(deltas)

    def _take_prompt(self, prompt: int, output: PromptOutput) -> None:
        """It arrives before anything else of this prompt's answers."""
        self.prompts[prompt] = output
        if self.request.echoes_logprobs:
            assert output.logprobs is not None
            token_ids = self.request.requests[prompt].prompt_token_ids
            echo = self.request.echoes[prompt]
            echoed = EchoedTokens(self._vocabulary, token_ids, output.logprobs, echo)
            for choice in self.choices[prompt * self.request.n : (prompt + 1) * self.request.n]:
                choice.echo_logprobs(echoed)

    def _end(self, choice: Choice, output: RequestOutput) -> None:
        self._num_open -= 1
        self.usage.num_reasoning += choice.num_reasoning
        self.usage.num_looped += choice.has_looped
        choice.num_cached = output.num_cached_tokens
        if output.index == 0:  # the other samples of a prompt share the blocks of the first
            self.usage.num_cached += output.num_cached_tokens
        if output.finish:
            self._metrics.preemptions_per_answer.observe(output.finish.num_preemptions)
        else:  # a stop string, or a loop: the engine does not know
            self._engine.streams.abort(output.request_id, output.index)
        if choice.num_tokens > 1:
            span_s = choice.last_token_s - choice.first_token_s
            tpot_s = span_s / (choice.num_tokens - 1)
            self._metrics.tpot.observe(tpot_s)
            if (target_s := self.request.tpot_target_s) is not None:
                self._metrics.predictions.on_target("tpot", is_met=tpot_s <= target_s)
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
        now_s = time.monotonic()  # later than gaps.now_s, after the streams before it
        ttft_s = now_s - self.request.arrival_s
        self._metrics.ttft.observe(ttft_s)
        prompt, index = divmod(choice.index, self.request.n)
        times, target_s = self._times[prompt], self.request.requests[prompt].ttft_target_s
        if target_s is not None and not index:
            predictions = self._metrics.predictions
            predictions.on_target("ttft", is_met=ttft_s <= target_s)
            if times.predicted_ttft_s is not None:
                predictions.on_first_token(times.predicted_ttft_s, ttft_s)
        if (started_s := times.started_s[index]) is not None:
            self._metrics.prefill_time.observe(now_s - started_s)


async def collected(generation: Generation) -> list[OutputDelta]:
    """All choices, each as one whole delta, in order."""
    parts: list[list[OutputDelta]] = [[] for _ in generation.choices]
    news = asyncio.Event()
    generation.listen(news.set)
    while True:
        news.clear()
        for delta in generation.take():
            parts[delta.choice].append(delta)
        if generation.has_ended:
            return [joined(each) for each in parts]
        await news.wait()


def _ignore() -> None:
    """The callback while nothing listens."""
