"""Blocks of KV cache: their reference counts, and which are free. It never sees a token.

A block is *used* (referenced by one sequence, or shared by several), *evictable* (referenced by
none, but `prefix.py` can still find it by its content) or *free*. Every operation is O(1) per
block.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence in logical order: token p is in block_ids[p // block_size].

    num_cached: how many of the first blocks have been added to the prefix index. num_released: how
    many of the first it does not hold any more, because no token reads them: their entries are
    void.
    """

    block_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_released: int = 0

    @property
    def num_held(self) -> int:
        return len(self.block_ids) - self.num_released


class BlockAllocator:
    """Reference counts and the free list."""

    def __init__(self, num_blocks: int, evictable: Container[int] = ()) -> None:
        """evictable: blocks that are so from the beginning; all others are free."""
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        # Popped from the end: lowest ids first.
        self._free = [i for i in range(num_blocks - 1, -1, -1) if i not in evictable]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A free block with a reference count of 1, or None where no block is free."""
        if not self._free:
            return None
        block_id = self._free.pop()
        self._ref_counts[block_id] = 1
        return block_id

    def take_up_to(self, num: int) -> list[int]:
        """As many free blocks, or all there are, as `take` would give one after the other."""
        taken = self._free[: -num - 1 : -1]
        del self._free[len(self._free) - len(taken) :]
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def share(self, block_id: int) -> None:
        """Adds a reference to a used or an evictable block; the caller says that the latter is no
        longer evictable."""
        self._ref_counts[block_id] += 1

    def release(self, block_id: int) -> bool:
        """Removes a reference; true if it was the last. Then the caller frees the block or makes it
        evictable."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is released but not used"
        self._ref_counts[block_id] -= 1
        return self._ref_counts[block_id] == 0

    def free(self, block_id: int) -> None:
        """Returns a block without references to the free list."""
        assert self._ref_counts[block_id] == 0, f"block {block_id} is freed but used"
        self._free.append(block_id)

    def release_all(self, block_ids: Iterable[int]) -> list[int]:
        """Releases each; returns those that have no reference any more."""
        counts, unused = self._ref_counts, []
        for block_id in block_ids:
            count = counts[block_id] = counts[block_id] - 1
            assert count >= 0, f"block {block_id} is released but not used"
            if not count:
                unused.append(block_id)
        return unused

    def free_all(self, block_ids: Iterable[int]) -> None:
        """Frees each, in this order."""
        for block_id in block_ids:
            self.free(block_id)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]
