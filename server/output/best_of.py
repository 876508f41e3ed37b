"""`best_of`: of the answers that were made to a prompt, the n that the model finds likeliest."""

import math
from collections.abc import Sequence

from penstock.server.output.delta import OutputDelta


def likeliest(deltas: Sequence[OutputDelta], num_sampled: int, n: int) -> list[OutputDelta]:
    """n of each num_sampled whole choices, best first, numbered anew.

    By the mean logprob of a token: by the sum, the shortest answer would win.
    """
    kept: list[OutputDelta] = []
    for start in range(0, len(deltas), num_sampled):
        ranked = sorted(deltas[start : start + num_sampled], key=_mean_logprob, reverse=True)
        kept += ranked[:n]
    return [delta._replace(choice=index) for index, delta in enumerate(kept)]


def _mean_logprob(delta: OutputDelta) -> float:
    if not delta.logprobs:
        return -math.inf  # nothing was said that could be likely
    return sum(entry.logprobs.logprob for entry in delta.logprobs) / len(delta.logprobs)
