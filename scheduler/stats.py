"""Snapshots for metrics: the scheduler is read, and never meets Prometheus."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.scheduler.types import ScheduledBatch


class SchedulerStats(NamedTuple):
    """The scheduler after a step. Gauges say what is; counters count since the start.

    A block is used (held by a sequence), idle (held by none, findable by its content) or free.
    """

    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_idle_blocks: int
    num_free_blocks: int
    prefix_query_tokens_total: int
    prefix_hit_tokens_total: int
    preemptions_total: int
    recomputed_tokens_total: int


class AttentionWork(NamedTuple):
    """What a step's attention reads and computes in each layer that has one given window.

    context_tokens: keys (and values) that are read, summed over the sequences. pairs: (query, key).
    """

    context_tokens: int
    pairs: int


class StepWork(NamedTuple):
    """What one step has to compute and read.

    num_scored: prompt tokens that go through the output layer besides those that sample.
    attention: for each of the model's windows, in its order. num_experts: experts of a mixture that
    the step's tokens were routed to, summed over the layers; None where that is not known.
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
    decodes, num_tokens = batch.starts[:num_decodes], batch.num_tokens[num_decodes:]
    chunks = list(zip(batch.starts[num_decodes:], num_tokens, strict=True))
    return StepWork(
        num_prefill_tokens=sum(num_tokens),
        num_decode_tokens=num_decodes,
        num_sequences=len(batch.slots),
        num_sampled=sum(batch.samples),
        num_scored=batch.num_scored,
        attention=tuple(_attention_work(decodes, chunks, window) for window in windows),
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
