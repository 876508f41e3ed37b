"""`KVGroup`: the layers of a model that keep the keys and values of the same positions.
`StateGroup`: those that keep a recurrent state instead.

Most models have one group. Where some layers have a sliding window, those of one window are a group
of their own: it has its own pool of blocks, and each sequence a block table in it. A block holds as
many tokens in every group, so a prefix can be found at the end of any block, whatever its groups.
(Groups of unequal blocks, as where block sizes are chosen for equal bytes, find it only where all
of them end.)

Layers with a recurrence keep one state of a sequence, whatever its length: a pool of states is one
of blocks of which each sequence has one.
"""

from dataclasses import dataclass
from math import gcd

# A step may read keys from a multiple of so many positions on: those of a tile that begins before
# the window have no weight, but they must be of the sequence, since 0 times NaN is NaN.
READ_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class KVGroup:
    """window: how many positions a token attends to, its own included, or None for all before it.
    alignment: the positions before the window that may be read too, see `first_read`."""

    num_blocks: int
    window: int | None = None
    alignment: int = READ_ALIGNMENT

    def first_read(self, position: int) -> int:
        """The first position that the token at `position` may read; none after it reads earlier
        ones."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.alignment * self.alignment

    def most_blocks(self, num_tokens: int, block_size: int) -> int:
        """That a sequence of so many tokens ever needs at once, if no step computes more of it than
        the rest of a block.

        With a window of W and blocks of B tokens: when a token begins a block, the first position
        that is read is at most W + alignment - 2 before it, and up to B - gcd(alignment, B) behind
        the start of its own block.
        """
        num_blocks = -(-num_tokens // block_size)
        if self.window is None:
            return num_blocks
        before = self.window + self.alignment - 2 + block_size - gcd(self.alignment, block_size)
        return min(num_blocks, before // block_size + 1)


@dataclass(frozen=True, slots=True)
class StateGroup:
    """num_blocks: states, of all layers of the group together."""

    num_blocks: int

    def most_blocks(self, num_tokens: int, block_size: int) -> int:
        """See `KVGroup`. Snapshots are not counted: a sequence runs without them."""
        return 1
