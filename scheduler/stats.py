"""Snapshots for metrics: the scheduler is read, and knows nothing of Prometheus."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

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
    invalid_logits_total: int = 0

    def plus_counters(self, earlier: Self) -> Self:
        """With the counters of a scheduler that another engine had before."""
        names = [name for name in self._fields if name.endswith("_total")]
        return self._replace(
            **{name: getattr(self, name) + getattr(earlier, name) for name in names}
        )


class AttentionWork(NamedTuple):
    """What a step's attention reads and computes in each layer that has one given window.

    context_tokens: keys (and values) that are read, summed over the sequences. pairs: (query, key).
    """

    context_tokens: int
    pairs: int


class StepWork(NamedTuple):
    """What one step has to compute and read.

    num_decode_tokens: drafts included. num_sampled: tokens that go through the output layer, to
    sample or to verify a draft. num_scored: prompt tokens that do so besides. attention: for each
    of the model's windows, in its order. num_experts: experts of a mixture that the step's tokens
    were routed to, summed over the layers; None where that is not known.
    """

    num_prefill_tokens: int
    num_decode_tokens: int
    num_sequences: int
    num_sampled: int
    num_scored: int
    attention: tuple[AttentionWork, ...]
    num_experts: int | None = None


NO_WORK = StepWork(0, 0, 0, 0, 0, ())


def work_of(batch: ScheduledBatch, windows: Iterable[int | None]) -> StepWork:
    """windows: those that the model's layers have, each once; None for a layer without one."""
    num_decodes = batch.num_decodes
    num_decode_tokens = sum(batch.num_tokens[:num_decodes])
    num_drafts = num_decode_tokens - num_decodes
    # Rows of one token, which nearly all decodes are, need no arithmetic of their own.
    num_short = 0 if num_drafts else num_decodes
    short = batch.starts[:num_short]
    long = list(zip(batch.starts[num_short:], batch.num_tokens[num_short:], strict=True))
    return StepWork(
        num_prefill_tokens=sum(batch.num_tokens[num_decodes:]),
        num_decode_tokens=num_decode_tokens,
        num_sequences=len(batch.slots),
        num_sampled=sum(batch.samples) + num_drafts,
        num_scored=batch.num_scored,
        attention=tuple(_attention_work(short, long, window) for window in windows),
    )


def _attention_work(
    decodes: Sequence[int], chunks: Sequence[tuple[int, int]], window: int | None
) -> AttentionWork:
    """decodes: positions. chunks: (first position, tokens). A query at position p attends to p + 1
    keys, or as many as the window has: a chunk's keys begin with those of its first query."""
    if window is None:
        keys = sum(decodes) + len(decodes)
        return AttentionWork(
            context_tokens=keys + sum(start + n for start, n in chunks),
            pairs=keys + sum(_sum_to(start + n) - _sum_to(start) for start, n in chunks),
        )
    keys = sum(min(start + 1, window) for start in decodes)
    pairs = sum(_sum_to(start + n) - _sum_to(start) for start, n in chunks)
    unseen = sum(_sum_to(start + n - window) - _sum_to(start - window) for start, n in chunks)
    return AttentionWork(
        context_tokens=keys + sum(min(start, window - 1) + n for start, n in chunks),
        pairs=keys + pairs - unseen,
    )


def _sum_to(n: int) -> int:
    """1 + 2 + ... + n; 0 for a negative n."""
    return n * (n + 1) // 2 if n > 0 else 0
