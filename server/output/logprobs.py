"""Logprobs of prompt tokens, for `echo` and `prompt_logprobs`."""

import math
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from penstock.scheduler.prompt_logprobs import PackedLogprobs, PromptLogprobs
from penstock.server.output.detokenizer import TextDecoder, Vocabulary

# JSON has no infinity; OpenAI's value for a token with probability 0.
_LOWEST_LOGPROB = -9999.0

# vLLM's form of one position: token id -> its logprob, rank and text. None at the first.
PositionLogprobs = dict[str, dict[str, Any]] | None

# Positions that are written at a time: while these become JSON no other thread runs.
_SLICE = 1024


class EchoedToken(NamedTuple):
    """A prompt's token, in an answer that begins with the prompt. offset: as in `LogprobEntry`.
    logprobs: None for the first token, which nothing predicts."""

    token_id: int
    logprobs: PromptLogprobs | None
    offset: int


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB


class EchoedTokens:
    """The tokens of a prompt with which an answer begins, made when they are read, in slices.
    Special tokens have an offset of their own where the echo has their text."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        token_ids: Sequence[int],
        logprobs: PackedLogprobs,
        echo: str,
    ) -> None:
        """logprobs: of all tokens except the first. echo: the prompt's text, as it is echoed."""
        assert len(logprobs) == len(token_ids) - 1, (len(logprobs), len(token_ids))
        self._vocabulary = vocabulary
        self._token_ids = token_ids
        self._logprobs = logprobs
        self._echo = echo

    def __len__(self) -> int:
        return len(self._token_ids)

    def slices(self) -> Iterator[list[EchoedToken]]:
        decoder = TextDecoder(self._vocabulary, is_whole=True, shows_special=True)
        num_added = _num_added(self._vocabulary, self._token_ids, self._echo)
        for start, token_ids, logprobs in _slices(self._token_ids, self._logprobs):
            echoed = []
            for i, (token_id, known) in enumerate(zip(token_ids, logprobs, strict=True), start):
                if i >= num_added:
                    decoder.feed(token_id)
                echoed.append(EchoedToken(token_id, known, decoder.token_start))
            yield echoed


def _slices(
    token_ids: Sequence[int], logprobs: PackedLogprobs
) -> Iterator[tuple[int, Sequence[int], list[PromptLogprobs | None]]]:
    """Where each begins, and its tokens with their logprobs. logprobs: of all but the first."""
    for start in range(0, len(token_ids), _SLICE):
        end = start + _SLICE
        known: list[PromptLogprobs | None] = [None] if start == 0 else []
        known += logprobs[max(start - 1, 0) : end - 1]
        yield start, token_ids[start:end], known


def _num_added(vocabulary: Vocabulary, token_ids: Sequence[int], echo: str) -> int:
    """How many special tokens the tokenizer has put before the text: the echo lacks them."""
    leading = list(takewhile(vocabulary.is_special, token_ids))
    for num in range(len(leading) + 1):
        if vocabulary.text_of(token_ids[num:], shows_special=True).startswith(echo):
            return num
    # The tokenizer has changed the text, for example its Unicode form.
    is_added = (not echo.startswith(vocabulary.spelling(i).decode()) for i in leading)
    return sum(takewhile(bool, is_added))


def by_position(
    vocabulary: Vocabulary, token_ids: Sequence[int], logprobs: PackedLogprobs, num_top: int
) -> Iterator[list[PositionLogprobs]]:
    """vLLM's `prompt_logprobs`, in slices: at each position the prompt's token, then the num_top
    likeliest. logprobs: of all tokens except the first."""
    for _, ids, known in _slices(token_ids, logprobs):
        yield [
            each and _position(vocabulary, token_id, each, num_top)
            for token_id, each in zip(ids, known, strict=True)
        ]


def _position(
    vocabulary: Vocabulary, token_id: int, logprobs: PromptLogprobs, num_top: int
) -> dict[str, dict[str, Any]]:
    position = {str(token_id): _described(vocabulary, token_id, logprobs.logprob, logprobs.rank)}
    for rank, (top_id, logprob) in enumerate(logprobs.top[:num_top], start=1):
        if top_id != token_id:
            position[str(top_id)] = _described(vocabulary, top_id, logprob, rank)
    return position


def _described(vocabulary: Vocabulary, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    return {
        "logprob": finite(logprob),
        "rank": rank,
        "decoded_token": vocabulary.spelling(token_id).decode(errors="replace"),
    }
