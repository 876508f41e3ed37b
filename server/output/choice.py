"""`Choice`: one answer while it is generated, from token ids to text and parts."""

from collections.abc import Sequence

from penstock.scheduler.types import Finish, FinishReason, RequestOutput
from penstock.server.errors import GrammarFailed, InvalidLogits
from penstock.server.output.delta import LogprobEntry, OutputDelta
from penstock.server.output.detokenizer import StopScanner, TextDecoder
from penstock.server.output.logprobs import EchoedTokens
from penstock.server.output.loops import LoopDetector
from penstock.server.output.parts import AnswerReader, Part, TextPart, merged

# What ended an answer that repeats itself, in vLLM's word.
LOOP = "repetition_detected"


class Choice:
    """One answer: ids in, text out, until the engine or a stop string ends it."""

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
        loop: LoopDetector | None = None,
    ) -> None:
        """See `GenerationRequest` for the last five."""
        self.index = index
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_string: str | None = None  # the one that ended it, if one did
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self.num_cached = 0  # tokens of its prompt that prefix hits spared, once it has ended
        self._decoder = decoder
        self._scanner = scanner
        self._includes_stop = includes_stop
        self._echo = echo  # until it has been sent
        self._min_tokens = min_tokens
        self._token_ids: list[int] | None = [] if wants_token_ids else None  # not yet sent
        self.num_reasoning = 0
        self._reader = reader
        self._loop = loop
        self.has_looped = False  # which ended it
        self._parts: list[Part] = []  # not yet sent
        self._num_echoed = self._num_sent = len(echo)
        self._entries: list[LogprobEntry] = []  # of tokens whose text is held back
        self._echoed: EchoedTokens | None = None  # until they have been sent
        # The logprobs are then those of all sampled ids, as the ids are.
        self._shows_all = self._shows_stop = wants_token_ids

    def echo_logprobs(self, echoed: EchoedTokens) -> None:
        """Call it before the first token. The token that ends the answer is then reported too:
        evaluation harnesses expect as many entries after the prompt's as were sampled."""
        self._echoed, self._shows_stop = echoed, True

    def take(self, output: RequestOutput) -> OutputDelta | None:
        """Takes new ids; None if there is nothing to send yet."""
        shown_ids = output.token_ids
        if output.finish and output.finish.stop_token_id is not None and not self._includes_stop:
            shown_ids = shown_ids[:-1]  # it counts, but is not shown
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
            if self.stop_string:
                return self._finish(text, "stop")
            if self._loop and self._loop.feed(token_id):
                self.has_looped = True
                return self._finish(text + self._held_back(), "length", LOOP)
        if len(shown_ids) < len(output.token_ids):
            self.num_tokens += 1
            if self._token_ids is not None:
                self._token_ids.append(output.token_ids[-1])
            if self._shows_stop and output.logprobs:
                end = self._num_sent + len(text)
                self._entries.append(LogprobEntry(output.token_ids[-1], output.logprobs[-1], end))
        if output.finish:
            return self._end(text, output.finish)
        if not text:
            return None
        self._num_sent += len(text)
        entries = self._take_entries()
        if self._reader and not (self._parts or entries or self._token_ids):
            return None  # the reader holds back what may be markup
        return self._delta(text, entries, None)

    def _end(self, text: str, finish: Finish) -> OutputDelta:
        """The engine has ended it. Raises GrammarFailed and InvalidLogits."""
        if finish.reason is FinishReason.ERROR:
            raise GrammarFailed
        if finish.reason is FinishReason.INVALID_LOGITS:
            raise InvalidLogits
        text += self._held_back()
        reason = "stop" if self.stop_string else finish.reason.value
        return self._finish(text, reason, finish.stop_token_id)

    def _held_back(self) -> str:
        """Text that could have become a character, or a stop string, and now does not."""
        rest = self._pass(self._decoder.end())
        if self._scanner and not self.stop_string:
            rest += self._scanner.end()
        if self._reader:
            self._parts += self._reader.feed(rest)
        return rest

    def _delta(self, text: str, entries: list[LogprobEntry], reason: str | None) -> OutputDelta:
        num_new = len(text)
        if self._echo:
            text, self._echo = self._echo + text, ""
        echoed, self._echoed = self._echoed, None
        if self._token_ids is None and self._reader is None:
            return OutputDelta(self.index, text, entries, reason, echoed=echoed)
        token_ids: Sequence[int] = ()
        if self._token_ids is not None:
            token_ids, self._token_ids = self._token_ids, []
        parts, self._parts = self._parts, []
        if self._reader and len(text) > num_new:
            parts = [TextPart(text[: len(text) - num_new]), *parts]
        sent = merged(parts) if self._reader else None
        return OutputDelta(self.index, text, entries, reason, token_ids, sent, echoed)

    def _read(self, reader: AnswerReader, text: str) -> None:
        """Adds one token's text. It counts as reasoning if the reasoning continues after it."""
        was_thinking = reader.is_thinking
        self._parts += reader.feed(text)
        self.num_reasoning += was_thinking and reader.is_thinking

    def _pass(self, text: str) -> str:
        """Through the scanner, if there is one."""
        if self._scanner is None or not text or self.num_tokens <= self._min_tokens:
            return text
        text = self._scanner.feed(text)
        self.stop_string = self._scanner.stop
        return text

    def _finish(self, text: str, reason: str, ended_by: str | int | None = None) -> OutputDelta:
        if self._reader:
            self._parts += self._reader.end()
            if self._reader.has_calls and reason == "stop":
                reason = "tool_calls"
        self.finish_reason = reason
        self._num_sent += len(text)
        is_cut = self.stop_string and not self._shows_all
        entries = self._take_entries() if is_cut else self._entries
        ended_by = self.stop_string or ended_by
        return self._delta(text, entries, reason)._replace(ended_by=ended_by)

    def _take_entries(self) -> list[LogprobEntry]:
        """Those of the tokens whose text has been sent, at least in part."""
        if not self._entries:
            return []
        num_ready = sum(entry.offset < self._num_sent for entry in self._entries)
        entries, self._entries = self._entries[:num_ready], self._entries[num_ready:]
        return entries
