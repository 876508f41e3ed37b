"""`StateCache`: the recurrent states of one group of layers, and the snapshots kept of them.

It answers the questions that `KVCache` asks a `GroupCache`, of a pool in which one block is the
state of a whole sequence. A running sequence holds one, which each of its steps changes. So what
has been computed is found again only where a copy was made in time, a *snapshot*, after the last
token of a full block, by the digest of that block. A sequence continues from a copy of its own.

Snapshots are taken where a later prompt is likely to go on:
- where the prompt ends, but for the few last tokens (`OPENING`), since a chat template opens the
  answer with tokens that it may leave out in the next turn;
- where the answer ends: at the last full block, each snapshot replacing the one before;
- where an earlier prompt and this one part: its blocks were found further than any snapshot.

They are evictable from the beginning, in least-recently-used order, and none is taken where all
states are held by sequences. A snapshot goes to the tier, and into the journal, once it stays: that
of a prompt at once, that of an answer when the sequence ends or is preempted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.scheduler.cache.blocks import BlockTable
from penstock.scheduler.cache.group_cache import Share
from penstock.scheduler.cache.journal import BlockJournal, StoredBlock
from penstock.scheduler.cache.kv_events import KVEvents
from penstock.scheduler.cache.stored_pool import StoredPool
from penstock.scheduler.cache.tier import BlockTier
from penstock.scheduler.groups import StateGroup
from penstock.scheduler.stats import GroupBlocks

# Qwen's templates open an answer with three to seven tokens: <|im_start|>assistant, and what says
# whether to think.
OPENING = 8


@dataclass(slots=True)
class StateTable(BlockTable):
    """block_ids: the state of a running sequence, alone.

    wanted: positions in its prompt after which a snapshot is to be taken, ascending. pending:
    snapshots that launched steps take and that cannot be found yet, or that wait for a step whose
    drafts are right up to there. newest: the state and digest of the last that was taken of its
    answer.
    """

    wanted: list[int] = field(default_factory=list)
    pending: "list[_Pending]" = field(default_factory=list)
    newest: tuple[int, bytes] | None = None


class _Pending(NamedTuple):
    num_blocks: int
    state: int
    is_of_answer: bool


class StateCache(StoredPool):
    def __init__(
        self,
        group: StateGroup,
        block_size: int,
        journal: BlockJournal | None = None,
        tier: BlockTier | None = None,
        events: KVEvents | None = None,
        number: int = 0,
    ) -> None:
        super().__init__(group.num_blocks, journal, tier, events, number)
        self.group = group
        self._block_size = block_size

    def stats(self) -> GroupBlocks:
        return GroupBlocks(
            None, self.num_used, self.num_evictable, self.num_free, is_recurrent=True
        )

    def new_table(self) -> StateTable:
        return StateTable()

    def longest_hit(self, digests: Sequence[bytes], end: int) -> int:
        """See `GroupCache`: the blocks before the last snapshot."""
        while end and self._find(digests[end - 1]) is None:
            end -= 1
        return end

    def longest_reach(self, digests: Sequence[bytes], end: int) -> int:
        """See `GroupCache`."""
        while end and not self._is_within_reach(digests[end - 1]):
            end -= 1
        return end

    def missing(self, digests: Sequence[bytes]) -> list[bytes]:
        """See `GroupCache`: the state after all of them, or nothing."""
        return [each for each in digests[-1:] if self._find(each) is None]

    def share(
        self,
        digests: Sequence[bytes],
        num_computed: int,
        num_tokens: int,
        parent: BlockTable | None,
    ) -> Share:
        """See `GroupCache`: a state of its own, copied from the snapshot where it continues."""
        assert parent is None, "a state has gone on since the prompt's end"
        copied = None
        if num_computed:
            copied = self.find(digests[num_computed // self._block_size - 1])
            assert copied is not None, "it was found before"
        return Share(0, [], copied, 1, 1)

    def fits(self, share: Share, num_reserved: int) -> bool:
        """Running sequences need no further states, whatever they reserve of blocks."""
        return share.num_claimed <= self.num_available

    def admit(self, table: BlockTable, share: Share) -> None:
        """See `GroupCache`. The snapshot that is copied is evicted last, and where it is the only
        one, it becomes the sequence's own state."""
        assert isinstance(table, StateTable) and not table.block_ids
        if share.copied is not None:
            self.evict_last(share.copied)
            self._to_tier((share.copied,))
        state = self.take()
        assert state is not None, "no state is available; the scheduler must check before"
        table.block_ids = [state]
        table.wanted, table.newest = [], None

    def want(self, table: BlockTable, positions: Sequence[int], num_computed: int) -> None:
        """Snapshots of an admitted sequence, whose first num_computed tokens are computed, shall be
        taken after so many tokens, each a multiple of the block size."""
        assert isinstance(table, StateTable)
        table.wanted = sorted({each for each in positions if each > num_computed})

    def snapshots(self, table: BlockTable, start: int, end: int) -> list[tuple[int, int]]:
        """(position, state): to be taken by the step that computes its tokens from start to end, a
        part of its prompt."""
        assert isinstance(table, StateTable)
        taken = []
        while table.wanted and table.wanted[0] <= end:
            position = table.wanted.pop(0)
            if position > start and (state := self.take()) is not None:
                table.pending.append(_Pending(position // self._block_size, state, False))
                taken.append((position, state))
        return taken

    def answer_snapshot(
        self, table: BlockTable, position: int, *, is_draft: bool = False
    ) -> int | None:
        """The state that the step shall write which computes the last token of a block of its
        answer, the one before `position`; None where there is none. is_draft: that token is one,
        and where it is wrong, a later step shall write it."""
        assert isinstance(table, StateTable)
        num_blocks = position // self._block_size
        if table.pending and table.pending[-1].num_blocks == num_blocks:
            return table.pending[-1].state
        if not is_draft:
            self._drop_newest(table)
        taken = self.take()
        if taken is not None:
            table.pending.append(_Pending(num_blocks, taken, True))
        return taken

    def cache(self, table: BlockTable, digests: Sequence[bytes], root: bytes) -> None:
        """See `GroupCache`: its snapshots up to there can be found from now on."""
        assert isinstance(table, StateTable)
        while table.pending and table.pending[0].num_blocks <= len(digests):
            num_blocks, state, is_of_answer = table.pending.pop(0)
            digest = digests[num_blocks - 1]
            if is_of_answer:
                self._drop_newest(table)
            # Where there is another of the same tokens, this one becomes free.
            if self.add(digest, state):
                if is_of_answer:
                    table.newest = state, digest
                else:
                    self._keep(state, digest)
            self.unreference((state,))

    def release(self, table: BlockTable) -> None:
        """Frees its state, and those of snapshots whose tokens are not known yet."""
        assert isinstance(table, StateTable)
        self.unreference((*table.block_ids, *(each.state for each in table.pending)))
        if table.newest is not None:
            self._keep(*table.newest)
        table.block_ids, table.pending, table.newest = [], [], None

    def forget(self, table: BlockTable, digests: Sequence[bytes]) -> None:
        """Drops the snapshots with these digests, and those of the table."""
        self._forget(digests)

    def _keep(self, state: int, digest: bytes) -> None:
        """A snapshot stays, if it was not evicted meanwhile."""
        if self.find(digest) != state:
            return
        if self._journal:
            self._unrecorded.append(StoredBlock(state, digest, b""))
        self._to_tier((state,))

    def _drop_newest(self, table: StateTable) -> None:
        if table.newest is not None:
            state, digest = table.newest
            if self.find(digest) == state:
                self.drop(state)
            table.newest = None
