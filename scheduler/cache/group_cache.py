"""`GroupCache`: the blocks of one group of layers, and what a sequence needs of them.

`KVCache` asks every group the same questions: after which block can a sequence continue
(`longest_hit`), what does it take (`share`, `admit`, `append`), what may be given back (`slide`,
`release`), what can be found from now on (`cache`, `forget`). The digest of a block names
all tokens up to its end, so a group that keeps something else of them than their keys and values,
such as a recurrent state after some of the blocks, can answer by the same digests.
"""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.scheduler.cache.blocks import BlockTable
from penstock.scheduler.cache.journal import BlockJournal, StoredBlock
from penstock.scheduler.cache.kv_events import KVEvents
from penstock.scheduler.cache.stored_pool import StoredPool
from penstock.scheduler.cache.tier import BlockTier
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.stats import GroupBlocks


class Share(NamedTuple):
    """A waiting sequence needs this of one group; nothing is taken before `GroupCache.admit`.

    blocks: computed blocks that it references too, the first of which is number `first` of its
    table: it reads none before. copied: a computed block whose tokens it needs too, but which it
    will write to, so it gets a copy. num_new: blocks to take, the copy's included. num_claimed:
    blocks that stop being available: num_new, and those of `blocks` that are evictable now.
    """

    first: int
    blocks: list[int]
    copied: int | None
    num_new: int
    num_claimed: int


class GroupCache(StoredPool):
    def __init__(
        self,
        group: KVGroup,
        block_size: int,
        journal: BlockJournal | None,
        tier: BlockTier | None = None,
        events: KVEvents | None = None,
        number: int = 0,
    ) -> None:
        super().__init__(group.num_blocks, journal, tier, events, number)
        self.group = group
        self._block_size = block_size

    def stats(self) -> GroupBlocks:
        return GroupBlocks(self.group.window, self.num_used, self.num_evictable, self.num_free)

    def new_table(self) -> BlockTable:
        return BlockTable()

    def fits(self, share: Share, num_reserved: int) -> bool:
        """Whether it has what this takes and num_reserved blocks besides."""
        return share.num_claimed + num_reserved <= self.num_available

    def longest_hit(self, digests: Sequence[bytes], end: int) -> int:
        """The most blocks, up to `end`, after which a sequence can continue: all that its next
        token reads is there. digests: of the sequence's blocks."""
        if self.group.window is None:
            find, unverified = self._block_of.get, self._unverified
            for i, digest in enumerate(digests[:end]):
                block_id = find(digest)
                if block_id is None or (block_id in unverified and not self._verify(block_id)):
                    return i
            return end
        # From the end, so that each block is looked up once: a missing one is a new end.
        i = end
        while i > self._first_needed(end):
            i -= 1
            if self._find(digests[i]) is None:
                end = i
        return end

    def longest_reach(self, digests: Sequence[bytes], end: int) -> int:
        """As `longest_hit`, if what the tier has were in the pool."""
        i = end
        while i > self._first_needed(end):
            i -= 1
            if not self._is_within_reach(digests[i]):
                end = i
        return end

    def missing(self, digests: Sequence[bytes]) -> list[bytes]:
        """The ones that the pool does not have, of those that a sequence after them needs."""
        end = len(digests)
        return [each for each in digests[self._first_needed(end) :] if self._find(each) is None]

    def share(
        self,
        digests: Sequence[bytes],
        num_computed: int,
        num_tokens: int,
        parent: BlockTable | None,
    ) -> Share:
        """Says what a sequence of num_tokens needs whose first num_computed are computed: those of
        `parent`, or else found by their digests.

        With a window, no more new blocks than it needs at once; the others replace those that it
        gives back.
        """
        size = self._block_size
        num_full = num_computed // size
        first = min(num_full, self.group.first_read(num_computed) // size)
        copied = None
        if parent is not None:
            blocks = parent.block_ids[first:num_full]
            copied = parent.block_ids[num_full] if num_computed % size else None
        else:
            found = map(self.find, digests[first:num_full])
            blocks = [block_id for block_id in found if block_id is not None]
            assert len(blocks) == num_full - first, "they were found before"
        num_new = -(-num_tokens // size) - num_full
        if self.group.window is not None:
            most = self.group.most_blocks(num_tokens, size)
            num_new = min(num_new, max(1, most - len(blocks)))
        num_evictable = sum(block_id in self._evictable for block_id in blocks)
        return Share(first, blocks, copied, num_new, num_new + num_evictable)

    def may_share(self, table: BlockTable, position: int) -> bool:
        """Whether it still has all that the token at `position` reads."""
        return table.num_released * self._block_size <= self.group.first_read(position)

    def admit(self, table: BlockTable, share: Share) -> None:
        """Fills an empty block table. The blocks must be available."""
        assert not table.block_ids
        for block_id in share.blocks:
            self.reference(block_id)
        table.block_ids = [*(0,) * share.first, *share.blocks]
        table.num_cached = len(table.block_ids)
        table.num_released = share.first
        taken = self.take_free(share.num_new)
        table.block_ids += taken
        for _ in range(share.num_new - len(taken)):
            self.append(table)

    def append(self, table: BlockTable) -> int:
        block_id = self.take()
        assert block_id is not None, "no block is available; the scheduler must check before"
        table.block_ids.append(block_id)
        return block_id

    def slide(self, table: BlockTable, position: int) -> None:
        """Gives back the blocks that neither the token at `position` nor a later one reads."""
        first = min(self.group.first_read(position) // self._block_size, len(table.block_ids))
        if first > table.num_released:
            self._release(table.block_ids[table.num_released : first])
            table.num_released = first

    def release(self, table: BlockTable) -> None:
        """Releases all its blocks, the last first. Cached ones become evictable, others free."""
        self._release(table.block_ids[table.num_released :][::-1])
        table.block_ids = []
        table.num_cached = table.num_released = 0

    def cache(self, table: BlockTable, digests: Sequence[bytes], root: bytes) -> None:
        """Makes its first blocks findable, whose digests these are. root: for a journal alone."""
        for i in range(max(table.num_cached, table.num_released), len(digests)):
            if self.add(digests[i], table.block_ids[i]) and self._journal:
                parent = digests[i - 1] if i else root
                self._unrecorded.append(StoredBlock(table.block_ids[i], digests[i], parent))
        table.num_cached = len(digests)

    def forget(self, table: BlockTable, digests: Sequence[bytes]) -> None:
        """Makes the blocks of a table, and those with these digests, unfindable."""
        for block_id in table.block_ids[table.num_released :]:
            self.drop(block_id)
        self._forget(digests)

    def _first_needed(self, end: int) -> int:
        """The first of the blocks before number `end` that the token after them may read."""
        return min(end, self.group.first_read(end * self._block_size) // self._block_size)

    def _release(self, block_ids: Sequence[int]) -> None:
        # Not only its last user: what is used all the time shall not be lost with this process.
        self._to_tier(block_ids)
        self.unreference(block_ids)
