"""`place_drafts`: which drafts the decodes of a step get, and blocks for them."""

from collections.abc import Sequence as Items

from penstock.scheduler.cache.kv_cache import KVCache
from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.drafts.drafter import Drafter
from penstock.scheduler.types import TableUpdate


def place_drafts(
    drafter: Drafter,
    kv: KVCache,
    decodes: Items[Sequence],
    num_running: int,
    most: int,
    updates: list[TableUpdate],
) -> tuple[tuple[int, ...], ...]:
    """Returns the drafts of each decode, already counted as computed, or none where no decode has
    any. They take blocks that nobody needs: a step after this one is not to preempt because of
    them. num_running: sequences, each of which may need a block. most: drafts of all."""
    size, num_spare = kv.block_size, kv.num_available - num_running
    if kv.has_windows:
        num_spare = 0  # a sequence holds no more there than it was admitted for
    limits = []
    for sequence in decodes:
        limit = sequence.max_length - len(sequence.token_ids) - 1
        num_owned = kv.num_owned(sequence) * size - sequence.num_computed
        limits.append(min(limit, num_owned + max(0, num_spare) * size))
    all_drafts = drafter.propose(decodes, limits, most)
    if not any(all_drafts):
        return ()
    kept = []
    for sequence, drafts in zip(decodes, all_drafts, strict=True):
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
