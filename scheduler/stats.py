"""Snapshots for metrics: the scheduler is read, and knows nothing of Prometheus."""

from bisect import bisect_left
from collections.abc import Iterable
from enum import StrEnum
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar


class GroupBlocks(NamedTuple):
    """The blocks of one group of layers (`scheduler.groups`): used by a sequence, evictable (used
    by none, but findable) or free. Where is_recurrent, they are states, and those that are
    evictable are snapshots."""

    window: int | None = None
    num_used: int = 0
    num_evictable: int = 0
    num_free: int = 0
    is_recurrent: bool = False

    @property
    def usage(self) -> float:
        num_blocks = self.num_used + self.num_evictable + self.num_free
        return self.num_used / num_blocks if num_blocks else 0.0


class PlaceStats(NamedTuple):
    """Where a tier keeps blocks: memory, or a disk. Gauges are current values; counters count since
    the start.

    num_blocks: that can be found there; num_bytes: what is used of its space, by others too.
    Blocks: hit_blocks_total were loaded for a prompt, unwritten_blocks_total were evicted before
    they were copied, removed_blocks_total made room for others, damaged_blocks_total were found
    missing, cut off or changed.
    """

    num_blocks: int = 0
    num_bytes: int = 0
    hit_blocks_total: int = 0
    read_bytes_total: int = 0
    written_bytes_total: int = 0
    read_s_total: float = 0.0
    write_s_total: float = 0.0
    unwritten_blocks_total: int = 0
    removed_blocks_total: int = 0
    damaged_blocks_total: int = 0
    failed_writes_total: int = 0


class TierStats(NamedTuple):
    """A tier below the pool. memory, disk: None where it has no such place.

    Tokens of prompts: query_tokens_total were looked up, hit_tokens_total were loaded. Prompts, by
    why not all of what was looked up was loaded: absent_total, slower_total (than computing),
    unreadable_total (blocks were damaged), late_total (a load took too long, or one did shortly
    before).
    """

    memory: PlaceStats | None = None
    disk: PlaceStats | None = None
    query_tokens_total: int = 0
    hit_tokens_total: int = 0
    absent_total: int = 0
    slower_total: int = 0
    unreadable_total: int = 0
    late_total: int = 0


class DraftStats(NamedTuple):
    """Drafts of one source since the start. num_drafts_total: rows with drafts. By position:
    accepted, and reached, all before which were accepted."""

    source: str
    num_drafts_total: int = 0
    num_draft_tokens_total: int = 0
    accepted: tuple[int, ...] = ()
    reached: tuple[int, ...] = ()

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted)

    def plus(self, num_drafts: int, num_accepted: int) -> "DraftStats":
        """With a row of so many drafts, the first of which were accepted."""
        return DraftStats(
            self.source,
            self.num_drafts_total + 1,
            self.num_draft_tokens_total + num_drafts,
            _one_more(self.accepted, num_accepted),
            _one_more(self.reached, min(num_drafts, num_accepted + 1)),
        )


def _one_more(counts: tuple[int, ...], num: int) -> tuple[int, ...]:
    """In the first so many places."""
    if len(counts) < num:
        counts += (0,) * (num - len(counts))
    return (*[each + 1 for each in counts[:num]], *counts[num:])


class SchedulerStats(NamedTuple):
    """The scheduler after a step. Gauges are current values; counters count since the start.

    prefix_stateless_tokens_total: prompt tokens whose blocks were found, but no snapshot of the
    recurrent state after them, so that they were computed again.
    out_of_reach_total: requests refused because of their targets. fairness_index: None unless the
    policy is fair; see `FairQueue`. tier: None without one. drafts: by source. encoder_*: see
    `Inserts`.
    """

    num_running: int = 0
    num_waiting: int = 0
    prefix_query_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    preemptions_total: int = 0
    recomputed_tokens_total: int = 0
    invalid_logits_total: int = 0
    out_of_reach_total: int = 0
    fairness_index: float | None = None
    groups: tuple[GroupBlocks, ...] = (GroupBlocks(),)
    tier: TierStats | None = None
    prefix_stateless_tokens_total: int = 0
    drafts: tuple[DraftStats, ...] = ()
    encoder_queries_total: int = 0
    encoder_hits_total: int = 0
    encoder_seconds_total: float = 0.0

    @property
    def kv_usage(self) -> float:
        """The share of its blocks that sequences hold, of the group where it is largest."""
        return max([group.usage for group in self.groups])


Stats = TypeVar("Stats", PlaceStats, TierStats, SchedulerStats)


def plus(stats: Stats, **more: float) -> Stats:
    """With so much added to these fields."""
    return stats._replace(**{name: getattr(stats, name) + num for name, num in more.items()})


def plus_counters(stats: Stats, earlier: Stats) -> Stats:
    """Adds the counters that an earlier engine had, in all places of a tier too."""
    more: dict[str, Any] = {}
    for name, before in earlier._asdict().items():
        now = getattr(stats, name)
        if name.endswith("_total"):
            more[name] = now + before
        elif name in ("tier", "memory", "disk") and before is not None:
            more[name] = plus_counters(now or type(before)(), before)
        elif name == "drafts":
            more[name] = _sums(now, before)
    return stats._replace(**more)


def _sums(now: Iterable[DraftStats], before: Iterable[DraftStats]) -> tuple[DraftStats, ...]:
    """By source."""
    sums: dict[str, DraftStats] = {}
    for source, num_drafts, num_tokens, *by_position in (*now, *before):
        known = sums.get(source, DraftStats(source))
        pairs = zip((known.accepted, known.reached), by_position, strict=True)
        sums[source] = DraftStats(
            source,
            known.num_drafts_total + num_drafts,
            known.num_draft_tokens_total + num_tokens,
            *(tuple(map(sum, zip_longest(*pair, fillvalue=0))) for pair in pairs),
        )
    return tuple(sums.values())


class AttentionWork(NamedTuple):
    """A step's attention reads and computes this in each layer that has one given window.

    context_tokens: keys (and values) that are read, summed over the sequences;
    decode_context_tokens: of these, those of decodes. pairs: (query, key).
    """

    context_tokens: int
    pairs: int
    decode_context_tokens: int = 0


class GraphSizes(NamedTuple):
    """The numbers of tokens for which a device's graphs exist, ascending: it pads a step to the
    next larger one. decodes: of steps of decodes alone. chunks: of steps with prefill chunks.
    drafts: of steps of decodes that have drafts.

    A step that is larger than all of them is not padded.
    """

    decodes: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()

    def padding(self, num_tokens: int, *, has_chunks: bool, has_drafts: bool = False) -> int:
        """Tokens that are computed in vain."""
        sizes = self.chunks if has_chunks else self.drafts if has_drafts else self.decodes
        index = bisect_left(sizes, num_tokens)
        return sizes[index] - num_tokens if index < len(sizes) else 0


NO_GRAPHS = GraphSizes()


class StepClass(StrEnum):
    DECODE = "decode"  # one token each, and drafts
    PREFILL = "prefill"  # chunks of prompts
    MIXED = "mixed"  # both


class StepWork(NamedTuple):
    """The work of one step: all that it has to compute and read.

    num_decode_tokens: drafts too. num_sampled: tokens that go through the output layer, to sample.
    num_scored: prompt tokens that do so besides. attention: for each of the model's windows, in its
    order. num_experts: experts of a mixture that the step's tokens were routed to, summed over the
    layers; None where that is not known. num_padding: see
    `GraphSizes`. num_chunks: of the sequences, those that run a prefill chunk. adapter_bytes: of
    the LoRA adapters that the step reads.
    """

    num_prefill_tokens: int
    num_decode_tokens: int
    num_sequences: int
    num_sampled: int
    num_scored: int
    attention: tuple[AttentionWork, ...]
    num_experts: int | None = None
    num_padding: int = 0
    num_chunks: int = 0
    adapter_bytes: int = 0


NO_WORK = StepWork(0, 0, 0, 0, 0, ())


def class_of(work: StepWork) -> StepClass:
    """One without tokens encodes what prompts need."""
    if not work.num_decode_tokens:
        return StepClass.PREFILL
    return StepClass.MIXED if work.num_prefill_tokens else StepClass.DECODE


def expected_work(
    windows: Iterable[int | None],
    *,
    keys: int = 0,
    num_decodes: int = 0,
    chunk: int = 0,
    start: int = 0,
) -> StepWork:
    """A step of decodes that read `keys` positions, and of a chunk of so many tokens from `start`
    on. windows: as of `work_of`."""
    attention = []
    for window in windows:
        read = keys if window is None else min(keys, num_decodes * window)
        reach = start if window is None else min(start, window)
        pairs = chunk * reach + (chunk * (chunk + 1) // 2 if reach == start else 0)
        attention.append(AttentionWork(read + (reach + chunk if chunk else 0), read + pairs, read))
    num = num_decodes + (chunk > 0)
    return StepWork(chunk, num_decodes, num, num, 0, tuple(attention), num_chunks=num - num_decodes)
