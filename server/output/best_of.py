"""`best_of`: of the answers to a prompt, the n with the highest mean logprob."""

import math
from collections.abc import Sequence

from penstock.server.output.delta import OutputDelta


def likeliest(deltas: Sequence[OutputDelta], num_sampled: int, n: int) -> list[OutputDelta]:
    """The n best of each num_sampled complete choices, best first, with new indices.

    By the mean logprob per token: by the sum, the shortest answer would win.
    """
    kept: list[OutputDelta] = []
    for start in range(0, len(deltas), num_sampled):
        ranked = sorted(deltas[start : start + num_sampled], key=_mean_logprob, reverse=True)
        kept += ranked[:n]
    return [delta._replace(choice=index) for index, delta in enumerate(kept)]


def _mean_logprob(delta: OutputDelta) -> float:
    if not delta.logprobs:
        return -math.inf  # it has no tokens
    return sum(entry.logprobs.logprob for entry in delta.logprobs) / len(delta.logprobs)
