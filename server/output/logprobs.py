"""Logprobs of prompt tokens, for `echo` and `prompt_logprobs`."""

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from penstock.scheduler.types import PromptLogprobs
from penstock.server.output.detokenizer import TextDecoder, Vocabulary

# JSON has no infinity; OpenAI's value for a token with probability 0.
_LOWEST_LOGPROB = -9999.0

# vLLM's form of one position: token id -> its logprob, rank and text. None at the first.
PositionLogprobs = dict[str, dict[str, Any]] | None


class EchoedToken(NamedTuple):
    """A prompt's token, in an answer that begins with the prompt. offset: as in `LogprobEntry`.

    logprobs: None for the first token, which nothing predicts.
    """

    token_id: int
    logprobs: PromptLogprobs | None
    offset: int


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB


def echoed_tokens(
    vocabulary: Vocabulary,
    token_ids: Sequence[int],
    prompt_logprobs: Sequence[PromptLogprobs],
    echo: str,
) -> list[EchoedToken]:
    """prompt_logprobs: of all tokens except the first. echo: the prompt's text, as it is echoed.

    Special tokens have an offset of their own where the echo has their text.
    """
    decoder = TextDecoder(vocabulary, is_whole=True, shows_special=True)
    num_added = _num_added(vocabulary, token_ids, echo)
    echoed = []
    for i, (token_id, logprobs) in enumerate(zip(token_ids, (None, *prompt_logprobs), strict=True)):
        if i >= num_added:
            decoder.feed(token_id)
        echoed.append(EchoedToken(token_id, logprobs, decoder.token_start))
    return echoed


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
    vocabulary: Vocabulary,
    token_ids: Sequence[int],
    prompt_logprobs: Sequence[PromptLogprobs],
    num_top: int,
) -> list[PositionLogprobs]:
    """vLLM's `prompt_logprobs`: at each position the prompt's token, then the num_top likeliest.

    prompt_logprobs: of all tokens except the first.
    """
    positions: list[PositionLogprobs] = [None]
    for token_id, logprobs in zip(token_ids[1:], prompt_logprobs, strict=True):
        position = {
            str(token_id): _described(vocabulary, token_id, logprobs.logprob, logprobs.rank)
        }
        for rank, (top_id, logprob) in enumerate(logprobs.top[:num_top], start=1):
            if top_id != token_id:
                position[str(top_id)] = _described(vocabulary, top_id, logprob, rank)
        positions.append(position)
    return positions


def _described(vocabulary: Vocabulary, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    return {
        "logprob": finite(logprob),
        "rank": rank,
        "decoded_token": vocabulary.spelling(token_id).decode(errors="replace"),
    }
