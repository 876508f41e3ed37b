"""`StoredPool`: the blocks of one group of layers, and where they are besides the pool: in a
journal, with which they outlive the process, and in a tier.

It says when a block may be named to either: after the steps that wrote to it have completed.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

from penstock.scheduler.cache.blocks import BlockPool
from penstock.scheduler.cache.journal import BlockJournal, StoredBlock
from penstock.scheduler.cache.kv_events import KVEvents
from penstock.scheduler.cache.tier import BlockTier, TierBlock


class StoredPool(BlockPool):
    def __init__(
        self,
        num_blocks: int,
        journal: BlockJournal | None,
        tier: BlockTier | None = None,
        events: KVEvents | None = None,
        number: int = 0,
    ) -> None:
        """number: of the group, by which the tier and events know it."""
        survivors = journal.survivors() if journal else ()
        super().__init__(
            num_blocks,
            {block.block_id: block.digest for block in survivors},
            partial(events.on_removed, number) if events is not None else None,
        )
        assert len(self._block_of) == len(survivors), "the journal has a block twice"
        self._journal = journal
        self._tier = tier
        self._number = number
        # Blocks that were given back since the last call of `record`, and not evicted; and before,
        # each with the step that was launched last by then, which may have written to them.
        self._released: dict[int, bytes] = {}
        self._unstored: deque[tuple[int, dict[int, bytes]]] = deque()
        self._unverified = {block.block_id for block in survivors}
        self._unrecorded: list[StoredBlock] = []  # of the step that runs

    def settle(self, block_id: int, digest: bytes | None) -> None:
        """A block that was taken to be loaded can be found by its digest; without one it is
        free."""
        assert self.ref_count(block_id) == 1, f"block {block_id} was loaded while it was used"
        if digest is not None:
            self.add(digest, block_id)
        self.unreference((block_id,))

    def record(self, completed: int, launched: int) -> None:
        """See `KVCache`."""
        if self._released:
            self._unstored.append((launched, self._released))
            self._released = {}
        while self._unstored and self._unstored[0][0] <= completed:
            assert self._tier
            for block_id, digest in self._unstored.popleft()[1].items():
                if self.find(digest) == block_id:
                    self._tier.store(TierBlock(self._number, digest), block_id)
        if self._unrecorded:
            assert self._journal
            blocks, self._unrecorded = self._unrecorded, []
            self._journal.record([b for b in blocks if self.find(b.digest) == b.block_id])

    def _find(self, digest: bytes) -> int | None:
        """A block with this digest whose content is known to be right."""
        block_id = self.find(digest)
        if block_id is None or (block_id in self._unverified and not self._verify(block_id)):
            return None
        return block_id

    def _is_within_reach(self, digest: bytes) -> bool:
        """Whether the pool has such a block, or the tier."""
        assert self._tier is not None
        return self._find(digest) is not None or TierBlock(self._number, digest) in self._tier

    def _verify(self, block_id: int) -> bool:
        """Whether a block of an earlier engine is what it was; if not, it becomes free."""
        assert self._journal
        self._unverified.remove(block_id)
        is_intact = self._journal.is_intact(block_id)
        if not is_intact:
            self.drop(block_id)
        return is_intact

    def _to_tier(self, block_ids: Iterable[int]) -> None:
        """Those that can be found were used, and are to be in the tier."""
        if self._tier:
            for block_id in block_ids:
                if (digest := self._digest_of.get(block_id)) is not None:
                    self._released[block_id] = digest

    def _forget(self, digests: Sequence[bytes]) -> None:
        """No process shall find blocks with these digests."""
        for digest in digests:
            if (found := self.find(digest)) is not None:
                self.drop(found)
            if self._tier:
                self._tier.forget(TierBlock(self._number, digest))

    def _remove(self, block_id: int) -> None:
        super()._remove(block_id)
        if self._journal:
            self._unverified.discard(block_id)
            self._journal.erase(block_id)
        if self._tier:
            # It may become findable by the same digest while a later step is still to write it.
            for released in (self._released, *(blocks for _, blocks in self._unstored)):
                released.pop(block_id, None)
            self._tier.withdraw(self._number, block_id)
