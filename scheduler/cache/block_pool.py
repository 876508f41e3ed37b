"""`BlockPool`: which blocks of one group of layers are referenced, and which can be found."""

from penstock.scheduler.cache.blocks import BlockAllocator
from penstock.scheduler.cache.prefix import PrefixIndex
from penstock.scheduler.groups import KVGroup, StateGroup


class BlockPool:
    """What `GroupCache` and `StateCache` have in common."""

    group: KVGroup | StateGroup
    _allocator: BlockAllocator
    _index: PrefixIndex

    @property
    def num_blocks(self) -> int:
        return self.group.num_blocks

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    @property
    def num_evictable(self) -> int:
        return self._index.num_evictable

    @property
    def num_available(self) -> int:
        """Blocks that can be taken: free and evictable."""
        return self._allocator.num_free + self._index.num_evictable

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def ref_count(self, block_id: int) -> int:
        return self._allocator.ref_count(block_id)
