"""`Loads`: blocks on their way from the tier into the pool, and the sequences that wait for them.

A sequence that is next to be admitted, and whose prompt goes on in the tier where the pool's blocks
end, waits aside until those are loaded, while others go on. Then it is admitted as if they had been
in the pool all along. It waits once: what could not be loaded is computed.

The blocks of one sequence's load become findable together when the last of them is there. From then
on they are evictable, so that prompts that wait hold nothing that running sequences need.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.scheduler.cache.kv_cache import Admission, KVCache
from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.cache.tier import BlockTier, TierBlock
from penstock.scheduler.stats import TierStats, plus, plus_counters

# A load that takes this many times what was expected, and at least so long, is given up.
_LATE_FACTOR = 4.0
_LATE_S = 1.0
# After one was given up, as long as nobody waits for another: the disk may hang.
_PAUSE_S = 30.0

ComputeSeconds = Callable[[int, int], float | None]


@dataclass(slots=True, eq=False)
class _Load:
    """The blocks that one sequence asked for. block_ids: in the order of the prefix, group by
    group."""

    deadline_s: float
    block_ids: dict[TierBlock, int]
    open: set[TierBlock]
    failed: set[TierBlock] = field(default_factory=set)
    is_late: bool = False


class _Waiting(NamedTuple):
    loads: set[_Load]
    num_cached: int  # tokens that the pool had already


class Loads:
    """See the module. Without a tier nothing is loaded. compute_s(start, end): how long steps would
    take to compute the tokens from position `start` to `end` of a prompt; None where that is not
    known."""

    def __init__(self, kv: KVCache, tier: BlockTier | None, compute_s: ComputeSeconds) -> None:
        self._kv = kv
        self._tier = tier
        self._compute_s = compute_s
        self._load_of: dict[TierBlock, _Load] = {}  # of the blocks that are not settled
        self._open: dict[_Load, None] = {}
        self._waiting: dict[Sequence, _Waiting] = {}
        self._paused_until_s = 0.0
        self._counts = TierStats()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    def num_within_reach(self, sequence: Sequence, num_cached: int) -> int:
        """How many of its first tokens need not be computed, if the pool has num_cached."""
        if self._tier is None or sequence.needs_whole_prompt:
            return num_cached
        blocks, end = self._kv.beyond(sequence, num_cached)
        return end if blocks and self._pays(num_cached, end, self._new(blocks)) else num_cached

    def begin(self, sequence: Sequence, num_reserved: int, now: float) -> bool:
        """Whether it must wait for blocks, which are being loaded then. It is to be admitted else.

        num_reserved: blocks that must stay available. Without room for the whole sequence nothing
        is loaded yet.
        """
        if self._tier is None or not sequence.may_load or sequence.fork_parent is not None:
            return False
        admission = self._kv.plan(sequence)
        num_cached = admission.num_computed
        num_tokens = (len(sequence.token_ids) - 1) // self._kv.block_size * self._kv.block_size
        if num_cached >= num_tokens or sequence.needs_whole_prompt:
            sequence.may_load = False
            return False
        if not self._kv.fits(admission, num_reserved):
            return False
        sequence.may_load = False
        self._count(query_tokens_total=num_tokens - num_cached)
        blocks, end = self._kv.beyond(sequence, num_cached)
        if not blocks:
            self._count(absent_total=1)
            return False
        if now < self._paused_until_s:
            self._count(late_total=1)
            return False
        new = self._new(blocks)
        if not self._kv.has_room(new):
            return False  # it shares a window with others, and its end needs another one
        if not self._pays(num_cached, end, new):
            self._tier.decline()
            self._count(slower_total=1)
            return False
        loads = {load for block in blocks if (load := self._load_of.get(block))}
        if new:
            loads.add(self._start(admission, new, now))
        self._waiting[sequence] = _Waiting(loads, num_cached)
        return True

    def arrived(self, now: float) -> list[Sequence]:
        """The sequences that need not wait any longer."""
        if self._tier is None or not self._open:
            return []
        for block, is_intact in self._tier.loaded():
            load = self._load_of[block]
            load.open.discard(block)
            if not is_intact:
                load.failed.add(block)
        done = set()
        for load in list(self._open):
            if load.open and now >= load.deadline_s:
                self._give_up(load, now)
                done.add(load)
            if not load.open:
                self._settle(load)
                done.add(load)
        return self._without(done) if done else []

    def remove(self, sequence: Sequence) -> None:
        """It has ended. Its blocks come nevertheless."""
        del self._waiting[sequence]

    def on_admission(self, sequence: Sequence, num_cached: int) -> None:
        if sequence.num_cached_before_load is not None:
            self._count(hit_tokens_total=max(0, num_cached - sequence.num_cached_before_load))
            sequence.num_cached_before_load = None

    def stats(self) -> TierStats | None:
        return None if self._tier is None else plus_counters(self._tier.stats(), self._counts)

    def _new(self, blocks: list[TierBlock]) -> list[TierBlock]:
        return [block for block in blocks if block not in self._load_of]

    def _pays(self, start: int, end: int, blocks: list[TierBlock]) -> bool:
        """Whether loading is expected to be quicker than computing."""
        assert self._tier
        compute_s = self._compute_s(start, end)
        return compute_s is None or self._tier.load_s(blocks) < compute_s

    def _start(self, admission: Admission, blocks: list[TierBlock], now: float) -> _Load:
        assert self._tier
        # Room for the blocks must not be made by evicting those that they follow.
        self._kv.refresh(admission)
        expected_s = self._tier.load_s(blocks)
        deadline_s = now + max(_LATE_S, _LATE_FACTOR * expected_s)
        load = _Load(deadline_s, {}, set(blocks))
        self._open[load] = None
        for block in blocks:
            block_id = self._kv.groups[block.group].take()
            assert block_id is not None, "no block is available; the scheduler must check before"
            load.block_ids[block] = block_id
            self._load_of[block] = load
        # The first is marked as used last: without it, the others are of no use.
        self._tier.load({block: load.block_ids[block] for block in reversed(blocks)})
        return load

    def _give_up(self, load: _Load, now: float) -> None:
        """Nobody waits for it any longer; its blocks are free as soon as nothing writes to them."""
        assert self._tier
        cancelled = {block for block in load.open if self._tier.cancel(block)}
        load.open -= cancelled
        load.failed |= cancelled
        load.is_late = True
        self._paused_until_s = now + _PAUSE_S

    def _settle(self, load: _Load) -> None:
        """The last block first, so that each is evicted before the one before it."""
        del self._open[load]
        for block in reversed(load.block_ids):
            del self._load_of[block]
            digest = None if block in load.failed else block.digest
            self._kv.groups[block.group].settle(load.block_ids[block], digest)

    def _without(self, done: set[_Load]) -> list[Sequence]:
        """The sequences that wait for none but these."""
        ready = []
        for sequence, waiting in list(self._waiting.items()):
            ended = waiting.loads & done
            if any(load.is_late for load in ended):
                self._count(late_total=1)
            elif any(load.failed for load in ended):
                self._count(unreadable_total=1)
            waiting.loads.difference_update(done)
            if not waiting.loads:
                del self._waiting[sequence]
                sequence.num_cached_before_load = waiting.num_cached
                ready.append(sequence)
        return ready

    def _count(self, **more: int) -> None:
        self._counts = plus(self._counts, **more)
