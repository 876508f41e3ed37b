"""`best_of`: of the answers that were made to a prompt, the n that the model finds likeliest."""

import math
from collections.abc import Sequence

from penstock.server.output.generation import Piece


def likeliest(pieces: Sequence[Piece], num_sampled: int, n: int) -> list[Piece]:
    """n of each num_sampled whole choices, best first, numbered anew.

    By the mean logprob of a token: by the sum, the shortest answer would win.
    """
    kept: list[Piece] = []
    for start in range(0, len(pieces), num_sampled):
        ranked = sorted(pieces[start : start + num_sampled], key=_mean_logprob, reverse=True)
        kept += ranked[:n]
    return [piece._replace(choice=index) for index, piece in enumerate(kept)]


def _mean_logprob(piece: Piece) -> float:
    if not piece.logprobs:
        return -math.inf  # nothing was said that could be likely
    return sum(entry.logprobs.logprob for entry in piece.logprobs) / len(piece.logprobs)
