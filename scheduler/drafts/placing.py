"""`place_drafts`: which drafts the decodes of a step get, and blocks for them. `resolve_drafts`:
what became of them."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from itertools import chain, repeat

from penstock.scheduler.cache.kv_cache import KVCache
from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.drafts.drafter import Drafter
from penstock.scheduler.types import FurtherTokens, TableUpdate

# Of each decode of a step.
Drafts = tuple[tuple[int, ...], ...]


def place_drafts(
    drafter: Drafter,
    kv: KVCache,
    decodes: Items[Sequence],
    in_flight: Items[tuple[Items[Sequence], Drafts]],
    num_running: int,
    most: int,
    updates: list[TableUpdate],
) -> Drafts:
    """Returns the drafts of each decode, already counted as computed without them, or none where no
    decode has any. They take blocks that nobody needs: a step after this one is not to preempt
    because of them. in_flight: of the steps before this one whose results are not known, which
    sequences sample, and the drafts of the first of these. num_running: sequences, each of which
    may need a block. most: drafts of all."""
    size, num_spare = kv.block_size, kv.num_available - num_running
    if kv.has_windows:
        num_spare = 0  # a sequence holds no more there than it was admitted for
    limits = []
    for sequence in decodes:
        limit = sequence.max_length - sequence.num_computed - 1
        num_owned = kv.num_owned(sequence) * size - sequence.num_computed
        if kv.has_windows and in_flight:
            num_owned -= 1  # else its next token waits for a block: see `KVCache.may_go_on`
        limits.append(min(limit, num_owned + max(0, num_spare) * size))
    all_drafts = drafter.propose(decodes, limits, most, _drafts_in_flight(in_flight))
    if not any(all_drafts):
        return ()
    kept = []
    for sequence, drafts in zip(decodes, all_drafts, strict=True):
        if not drafts:
            kept.append(drafts)
            continue
        end = sequence.num_computed + len(drafts)
        num_new = -(-end // size) - kv.num_owned(sequence)
        if num_new > 0:
            if num_new > num_spare:  # others have had the last ones
                drafter.drop(sequence)
                drafts = ()
            else:
                num_spare -= num_new
                kv.grow(sequence, end, updates)
        kept.append(drafts)
    return tuple(kept)


def resolve_drafts(
    drafter: Drafter,
    sequences: Items[Sequence],
    drafts: Drafts,
    further: Mapping[int, FurtherTokens],
) -> None:
    """Takes back what was not accepted of the drafts of a step, whose ids the sequences do not have
    yet. sequences: of all rows that sampled, those with drafts first. further: by row."""
    for row, of_row in enumerate(drafts):
        if of_row:
            num_accepted = len(further[row].token_ids) if row in further else 0
            sequences[row].resolve_drafts(len(of_row), num_accepted)
            drafter.judge(sequences[row], num_accepted)


def _drafts_in_flight(
    in_flight: Iterable[tuple[Items[Sequence], Drafts]],
) -> dict[Sequence, list[tuple[int, ...]]]:
    """Of each row of a sequence, in the order of steps."""
    found: dict[Sequence, list[tuple[int, ...]]] = {}
    for sampling, drafts in in_flight:
        for sequence, of_row in zip(sampling, chain(drafts, repeat(())), strict=False):
            found.setdefault(sequence, []).append(of_row)
    return found
