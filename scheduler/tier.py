"""`BlockTier`: a place below the pool, such as a disk, where blocks of keys and values outlive it.

The pool's blocks are copied there when sequences that used them have ended, and copied back when a
prompt begins with them. The tier moves bytes in the background and verifies them; which blocks, and
when, is decided here, by their digests. The scheduler never waits for it.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from penstock.scheduler.stats import TierStats


class TierBlock(NamedTuple):
    """A full block, by what it holds: the tokens up to its end, and the group of layers."""

    group: int
    digest: bytes


class Loaded(NamedTuple):
    """A load that has ended. is_intact: whether the pool's block has the content now; else it may
    have any."""

    block: TierBlock
    is_intact: bool


class BlockTier(Protocol):
    """Of an executor that does not run ahead: its steps have completed when `execute` returns."""

    @property
    def key(self) -> bytes:
        """Of the digests: with it they mean the same in every process that uses the tier."""
        ...

    def __contains__(self, block: TierBlock) -> bool:
        """Whether a load may succeed. Answered from memory."""
        ...

    def store(self, block: TierBlock, block_id: int) -> None:
        """The pool's block is complete; it is to be copied, unless it is withdrawn before."""
        ...

    def withdraw(self, group: int, block_id: int) -> None:
        """The pool's block may be written to from now on. It need not have been stored."""
        ...

    def forget(self, block: TierBlock) -> None:
        """It must not be found any more, by any process."""
        ...

    def load(self, block: TierBlock, block_id: int) -> None:
        """Begins to copy it into a block of the pool, which nobody uses until the load has ended:
        `loaded` returns it, or `cancel` is true."""
        ...

    def loaded(self) -> Iterable[Loaded]:
        """The loads that have ended since the last call."""
        ...

    def cancel(self, block: TierBlock) -> bool:
        """Whether its load has ended with this call, which will not be in `loaded` then. False
        where it is just being copied: it ends soon."""
        ...

    def load_s(self, num_blocks: Mapping[int, int]) -> float:
        """How long it would take from now to load so many blocks of each group."""
        ...

    def decline(self) -> None:
        """A load was not begun because of `load_s`."""
        ...

    def flush(self) -> None:
        """Returns when what was stored is where it goes, or cannot be brought there in a few
        seconds."""
        ...

    def stats(self) -> TierStats:
        """As far as the tier knows them."""
        ...
