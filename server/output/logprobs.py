"""What the model thought of a prompt's own tokens, as `echo` and `prompt_logprobs` tell it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.scheduler.types import PromptLogprobs
from penstock.server.output.detokenizer import TextDecoder, Vocabulary

# JSON has no infinity; OpenAI's own stand-in for a token that cannot be.
_LOWEST_LOGPROB = -9999.0

# At one position, in vLLM's words: token id -> its logprob, rank and text. None at the first.
PositionLogprobs = dict[str, dict[str, Any]] | None


class EchoedToken(NamedTuple):
    """A prompt's token, in an answer that begins with the prompt. offset: as in `LogprobEntry`.

    logprobs: None for the first token, before which nothing stands.
    """

    token_id: int
    logprobs: PromptLogprobs | None
    offset: int


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB


def echoed_tokens(
    vocabulary: Vocabulary,
    token_ids: Sequence[int],
    told: Sequence[PromptLogprobs],
) -> list[EchoedToken]:
    """told: of all tokens but the first."""
    decoder = TextDecoder(vocabulary, is_whole=True)
    echoed = []
    for token_id, logprobs in zip(token_ids, (None, *told), strict=True):
        decoder.feed(token_id)
        echoed.append(EchoedToken(token_id, logprobs, decoder.token_start))
    return echoed


def by_position(
    vocabulary: Vocabulary,
    token_ids: Sequence[int],
    told: Sequence[PromptLogprobs],
    num_top: int,
) -> list[PositionLogprobs]:
    """vLLM's `prompt_logprobs`: at each position its own token, then the num_top best besides."""
    positions: list[PositionLogprobs] = [None]
    for token_id, logprobs in zip(token_ids[1:], told, strict=True):
        known = {str(token_id): _described(vocabulary, token_id, logprobs.logprob, logprobs.rank)}
        for rank, (top_id, logprob) in enumerate(logprobs.top[:num_top], start=1):
            if top_id != token_id:
                known[str(top_id)] = _described(vocabulary, top_id, logprob, rank)
        positions.append(known)
    return positions


def _described(vocabulary: Vocabulary, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    return {
        "logprob": finite(logprob),
        "rank": rank,
        "decoded_token": vocabulary.spelling(token_id).decode(errors="replace"),
    }
