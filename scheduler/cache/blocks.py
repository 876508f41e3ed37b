"""Blocks of KV cache: which are referenced, which can be found by content, and which are free.

A block is *used* (referenced by one sequence, or shared by several), *evictable* (referenced by
none, but it can still be found) or *free*. Every operation is O(1) per block.

Evictable blocks are evicted in least-recently-used order. A sequence releases its last block first,
so a block is always evicted before its parent, and every cached block can be found from the root.
Of layers with a window, blocks are given back as the window leaves them, the first one first: there
a block is of use without those far before it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence in logical order: token p is in block_ids[p // block_size].

    num_cached: how many of the first blocks have been made findable. num_released: how many of the
    first it does not hold any more, because no token reads them: their entries are void.
    """

    block_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_released: int = 0

    @property
    def num_held(self) -> int:
        return len(self.block_ids) - self.num_released


class BlockPool:
    """The blocks of one group of layers: their reference counts, their digests and the free list.
    It never sees a token."""

    def __init__(
        self,
        num_blocks: int,
        found: Mapping[int, bytes] | None = None,
        on_removed: Callable[[bytes], None] | None = None,
    ) -> None:
        """found: the digests of blocks that are evictable from the beginning, in the order of their
        eviction. on_removed: gets the digest of each block that is no longer findable."""
        self.num_blocks = num_blocks
        self._on_removed = on_removed
        self._ref_counts = [0] * num_blocks
        self._digest_of = dict(found or {})
        self._block_of = {digest: block_id for block_id, digest in self._digest_of.items()}
        self._evictable = OrderedDict.fromkeys(self._digest_of)
        # Popped from the end: lowest ids first.
        self._free = [i for i in range(num_blocks - 1, -1, -1) if i not in self._digest_of]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """Blocks that can be taken: free and evictable."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def find(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def take(self) -> int | None:
        """A block with a reference count of 1: a free one, else the least recently used evictable
        one, which is no longer findable; None where there is none."""
        if self._free:
            block_id = self._free.pop()
        elif self._evictable:
            block_id, _ = self._evictable.popitem(last=False)
            self._remove(block_id)
        else:
            return None
        self._ref_counts[block_id] = 1
        return block_id

    def take_free(self, num: int) -> list[int]:
        """As many free blocks, or all there are, as `take` would give one after the other."""
        taken = self._free[: -num - 1 : -1]
        del self._free[len(self._free) - len(taken) :]
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def reference(self, block_id: int) -> None:
        self._ref_counts[block_id] += 1
        self._evictable.pop(block_id, None)

    def unreference(self, block_ids: Iterable[int]) -> None:
        """Removes a reference of each, in this order. Those that have none any more become
        evictable if they are findable, and else free."""
        counts, digest_of = self._ref_counts, self._digest_of
        for block_id in block_ids:
            count = counts[block_id] = counts[block_id] - 1
            assert count >= 0, f"block {block_id} is released but not used"
            if count:
                continue
            if block_id in digest_of:
                self._evictable[block_id] = None
            else:
                self._free.append(block_id)

    def add(self, digest: bytes, block_id: int) -> bool:
        """Makes a used block findable, unless another block has the same digest; whether it did.

        A second block with the same content is not indexed, so block tables only ever grow.
        """
        if digest in self._block_of or block_id in self._digest_of:
            return False
        self._block_of[digest] = block_id
        self._digest_of[block_id] = digest
        return True

    def evict_last(self, block_id: int) -> None:
        """A block that is evictable shall be evicted after all others."""
        if block_id in self._evictable:
            self._evictable.move_to_end(block_id)

    def drop(self, block_id: int) -> None:
        """A block is no longer findable, if it was, and so no longer evictable."""
        if block_id in self._evictable:
            del self._evictable[block_id]
            self._free.append(block_id)
        if block_id in self._digest_of:
            self._remove(block_id)

    def _remove(self, block_id: int) -> None:
        digest = self._digest_of.pop(block_id)
        del self._block_of[digest]
        if self._on_removed is not None:
            self._on_removed(digest)
