"""`sample_drafted`: the ids of a step whose rows have drafts.

Each row samples after its last known token, and then after each draft for as long as the id before
it is that draft. So every id is drawn from logits, penalties and masks that follow from the ids
before it, as in a step without drafts.
"""

from itertools import accumulate, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.sampling.grammar_table import GrammarTable
from penstock.engine.sampling.sampler import INVALID_ID, Sampler
from penstock.scheduler.types import FinishReason, FurtherTokens, TokenLogprobs


class DraftedRow(NamedTuple):
    """length: tokens of the sequence before what is sampled first. drafts: those that follow."""

    slot: int
    length: int
    prompt_length: int
    drafts: tuple[int, ...]


class Verified(NamedTuple):
    """As the fields of `SampledTokens` of these names."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None
    failed: dict[int, FinishReason]
    further: dict[int, FurtherTokens]


def sample_drafted(
    sampler: Sampler,
    grammars: GrammarTable,
    logits: Tensor,
    token_table: Tensor,
    rows: list[DraftedRow],
) -> Verified:
    """logits: after each row's last known token and after each of its drafts, row after row.
    token_table: has the drafts. The masks of the slots' grammars have been started."""
    offsets = [0, *accumulate(1 + len(row.drafts) for row in rows)]
    ids: list[list[int]] = [[] for _ in rows]
    entries: list[list[TokenLogprobs | None]] = [[] for _ in rows]
    failed: dict[int, FinishReason] = {}
    # A mask follows from the ids before it: there one id is drawn at a time.
    constraints = grammars.constraints([row.slot for row in rows])
    places = [
        (i, at)
        for i, row in enumerate(rows)
        for at in range(1 + (0 if constraints[i] else len(row.drafts)))
    ]
    while places:
        whole = len(places) == len(logits)
        drawn, of_drawn = sampler.sample(
            logits if whole else logits[torch.tensor([offsets[i] + at for i, at in places])],
            [rows[i].slot for i, _ in places],
            [rows[i].length + at for i, at in places],
            token_table,
            [rows[i].prompt_length for i, _ in places],
        )
        for (i, _), token_id, entry in zip(
            places, drawn.tolist(), of_drawn or repeat(None), strict=False
        ):
            ids[i].append(token_id)
            entries[i].append(entry)
        stepwise = [(i, at) for i, at in places if constraints[i]]
        violated = grammars.advance(
            [rows[i].slot for i, _ in stepwise],
            [ids[i][-1] for i, _ in stepwise],
            [constraints[i] for i, _ in stepwise],
        )
        places = []
        for number, (i, at) in enumerate(stepwise):
            constraint, drafts, token_id = constraints[i], rows[i].drafts, ids[i][-1]
            assert constraint is not None
            if number in violated:
                if at == 0:
                    failed[i] = FinishReason.ERROR
                else:  # the next step finds it again, after the ids before it
                    ids[i].pop()
            elif token_id in drafts[at : at + 1] and token_id not in constraint.stop_token_ids:
                places.append((i, at + 1))
        grammars.start([rows[i].slot for i, _ in places])
    further = {}
    for i, row in enumerate(rows):
        num = _num_valid(ids[i], row.drafts)
        if ids[i][0] == INVALID_ID:
            failed[i] = FinishReason.INVALID_LOGITS
        if num > 1:
            logprobs = [entry for entry in entries[i][1:num] if entry is not None]
            further[i] = FurtherTokens(ids[i][1:num], logprobs or None)
    first = [each[0] for each in entries]
    return Verified([each[0] for each in ids], first if any(first) else None, failed, further)


def _num_valid(ids: list[int], drafts: tuple[int, ...]) -> int:
    """How many ids follow from drafts that were right. One after the first that is invalid is left
    to the next step, which ends the sequence with it."""
    num = 1
    while num < len(ids) and ids[num - 1] == drafts[num - 1]:
        num += 1
    return num - 1 if num > 1 and ids[num - 1] == INVALID_ID else num
