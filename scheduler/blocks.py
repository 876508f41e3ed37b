"""Blocks of KV cache: who holds each, and which are free. It never sees a token.

A block is *held* by one sequence or shared by several, *idle* (held by none, but its content can
still be found: `prefix.py` keeps those), or *free*. Every operation is O(1) per block.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence in logical order: token p lives in block_ids[p // block_size].

    num_named: how many of the first blocks have been offered to the prefix index.
    """

    block_ids: list[int] = field(default_factory=list)
    num_named: int = 0


class BlockAllocator:
    """Reference counts and the free list."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # popped from the end: lowest ids first

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A free block, now held once, or None where none is left."""
        if not self._free:
            return None
        block_id = self._free.pop()
        self._num_holders[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """One more holder, be the block held or idle (the caller takes it off the idle ones)."""
        self._num_holders[block_id] += 1

    def release(self, block_id: int) -> bool:
        """One holder fewer; true if that was the last. Then the caller frees it or lets it idle."""
        assert self._num_holders[block_id] > 0, f"block {block_id} is released but not held"
        self._num_holders[block_id] -= 1
        return self._num_holders[block_id] == 0

    def free(self, block_id: int) -> None:
        """Back to the free list. Nobody may hold it."""
        assert self._num_holders[block_id] == 0, f"block {block_id} is freed but held"
        self._free.append(block_id)

    def num_holders(self, block_id: int) -> int:
        return self._num_holders[block_id]
