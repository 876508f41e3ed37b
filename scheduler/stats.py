"""Snapshots for metrics: the scheduler is read, and knows nothing of Prometheus."""

from typing import NamedTuple

from penstock.scheduler.types import ScheduledBatch


class SchedulerStats(NamedTuple):
    """The scheduler after a step. Gauges are current values; counters count since the start.

    A block is used (by a sequence), evictable (used by none, but findable) or free.
    """

    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_evictable_blocks: int
    num_free_blocks: int
    prefix_query_tokens_total: int
    prefix_hit_tokens_total: int
    preemptions_total: int
    recomputed_tokens_total: int


class StepWork(NamedTuple):
    """What one step had to compute and read.

    context_tokens: keys and values that its rows attend to, summed over the sequences, so the KV
    bytes of a step are this times the bytes of one token. attention_pairs: (query, key) pairs.
    num_decode_tokens: drafts included. num_sampled: tokens that go through the output layer, to
    sample or to verify a draft. num_scored: prompt tokens that do so besides.
    """

    num_prefill_tokens: int
    num_decode_tokens: int
    num_sequences: int
    num_sampled: int
    context_tokens: int
    attention_pairs: int
    num_scored: int


NO_WORK = StepWork(0, 0, 0, 0, 0, 0, 0)


def work_of(batch: ScheduledBatch) -> StepWork:
    """The step's tokens, context and attention pairs: query at position p attends to p + 1 keys."""
    num_decodes = batch.num_decodes
    num_decode_tokens = sum(batch.num_tokens[:num_decodes])
    num_drafts = num_decode_tokens - num_decodes
    # Rows of one token, which nearly all decodes are, need no arithmetic of their own.
    num_short = 0 if num_drafts else num_decodes
    short_context = sum(batch.starts[:num_short]) + num_short
    long_rows = list(zip(batch.starts[num_short:], batch.num_tokens[num_short:], strict=True))
    return StepWork(
        num_prefill_tokens=sum(batch.num_tokens[num_decodes:]),
        num_decode_tokens=num_decode_tokens,
        num_sequences=len(batch.slots),
        num_sampled=sum(batch.samples) + num_drafts,
        context_tokens=short_context + sum(start + n for start, n in long_rows),
        attention_pairs=short_context + sum(n * start + n * (n + 1) // 2 for start, n in long_rows),
        num_scored=batch.num_scored,
    )
