"""The news of a choice: `OutputDelta`, and the token usage of a request."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.scheduler.types import TokenLogprobs
from penstock.server.output.logprobs import EchoedTokens
from penstock.server.output.parts import Part, TextPart, merged


class LogprobEntry(NamedTuple):
    """One token of a choice. offset: where in the choice's text it begins, in characters."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int


class OutputDelta(NamedTuple):
    """The news of one choice. finish_reason is None except in its last delta.

    finish_reason: "stop", "length", or "tool_calls" if it ended with calls.
    token_ids: empty unless the client asked for them; else all sampled ids, the stop token too.
    parts: what the text consists of, for an answer that may have calls or reasoning; else None.
    echoed: the prompt's tokens, in the first delta of an answer that begins with them and whose
    logprobs are wanted. ended_by: the stop string or the token id that ended the answer, in its
    last delta.
    """

    choice: int
    text: str
    logprobs: list[LogprobEntry]
    finish_reason: str | None
    token_ids: Sequence[int] = ()
    parts: Sequence[Part] | None = None
    echoed: EchoedTokens | None = None
    ended_by: str | int | None = None

    @property
    def all_parts(self) -> Sequence[Part]:
        """The parts; one part if the whole answer is plain text."""
        if self.parts is not None:
            return self.parts
        return (TextPart(self.text),) if self.text or self.logprobs else ()


@dataclass(slots=True)
class Usage:
    """num_cached: prompt tokens that prefix hits spared. num_reasoning: of the completion's.
    num_predicted, num_mispredicted: drafts of a prediction that were accepted, or not; None where
    there is none. num_looped: answers that ended since they repeated themselves."""

    num_prompt: int
    num_completion: int = 0
    num_cached: int = 0
    num_reasoning: int = 0
    num_predicted: int | None = None
    num_mispredicted: int = 0
    num_looped: int = 0


def coalesced(deltas: list[OutputDelta]) -> list[OutputDelta]:
    """One delta per choice: a client that has fallen behind gets all that waits at once."""
    if len(deltas) < 2:
        return deltas
    by_choice: dict[int, list[OutputDelta]] = {}
    for delta in deltas:
        by_choice.setdefault(delta.choice, []).append(delta)
    return [joined(each) for each in by_choice.values()]


def joined(deltas: list[OutputDelta]) -> OutputDelta:
    if len(deltas) == 1:
        return deltas[0]
    text = "".join(delta.text for delta in deltas)
    logprobs = [entry for delta in deltas for entry in delta.logprobs]
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    parts = None
    if deltas[-1].parts is not None:
        parts = merged(part for delta in deltas for part in delta.parts or ())
    last, echoed = deltas[-1], deltas[0].echoed
    return OutputDelta(
        *(last.choice, text, logprobs, last.finish_reason, token_ids, parts, echoed, last.ended_by)
    )


def likeliest(deltas: Sequence[OutputDelta], num_sampled: int, n: int) -> list[OutputDelta]:
    """`best_of`: the n best of each num_sampled complete choices, best first, with new indices. By
    the mean logprob per token: by the sum, the shortest answer would win."""
    kept: list[OutputDelta] = []
    for start in range(0, len(deltas), num_sampled):
        ranked = sorted(deltas[start : start + num_sampled], key=_mean_logprob, reverse=True)
        kept += ranked[:n]
    return [delta._replace(choice=index) for index, delta in enumerate(kept)]


def _mean_logprob(delta: OutputDelta) -> float:
    if not delta.logprobs:
        return -math.inf  # it has no tokens
    return sum(entry.logprobs.logprob for entry in delta.logprobs) / len(delta.logprobs)
