"""`best_of`: of the answers to a prompt, the n with the highest mean logprob."""

import math
from collections.abc import Sequence

from penstock.server.output.generation import Piece


def likeliest(pieces: Sequence[Piece], num_sampled: int, n: int) -> list[Piece]:
    """The n best of each num_sampled complete choices, best first, with new indices.

    By the mean logprob per token: by the sum, the shortest answer would win.
    """
    kept: list[Piece] = []
    for start in range(0, len(pieces), num_sampled):
        ranked = sorted(pieces[start : start + num_sampled], key=_mean_logprob, reverse=True)
        kept += ranked[:n]
    return [piece._replace(choice=index) for index, piece in enumerate(kept)]


def _mean_logprob(piece: Piece) -> float:
    if not piece.logprobs:
        return -math.inf  # it has no tokens
    return sum(entry.logprobs.logprob for entry in piece.logprobs) / len(piece.logprobs)
