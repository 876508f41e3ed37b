"""`BlockTier`: places below the pool, such as a disk, where blocks of keys and values outlive it.

The pool's blocks are copied there when sequences that used them have ended, and copied back when a
prompt begins with them. The tier moves bytes in the background and verifies them; which blocks, and
when, is decided here, by their digests. The scheduler never waits for it.

A device may run ahead: steps that were launched are then still to write to blocks, and to read
them, when the scheduler has given these to others. So three orders hold, whatever the device:

- A block is stored when the steps that wrote to it have completed, not only been launched: the
  scheduler names it no earlier (`GroupCache.record`).
- It is read before it is written to again: after `withdraw`, the next step that is launched may
  write to it. The tier has read it by then, or lets that step wait, or does not store it.
- A load writes to a block after all steps that were launched before `load`, whose sequences may
  have had that block; and before those that are launched after `loaded` has returned it, of which
  the first may read it. A load that was cancelled writes nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
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
    """One thread calls it, that which launches the steps."""

    @property
    def key(self) -> bytes:
        """Makes digests mean the same in every process that uses the tier."""

    def __contains__(self, block: TierBlock) -> bool:
        """Whether a load may succeed. Answered from memory."""

    def store(self, block: TierBlock, block_id: int) -> None:
        """The steps that wrote to the pool's block have completed; it is to be copied, unless it is
        withdrawn before."""

    def withdraw(self, group: int, block_id: int) -> None:
        """The pool's block may be written to by what is launched from now on. It need not have been
        stored."""

    def forget(self, block: TierBlock) -> None:
        """It must not be found any more, by any process."""

    def load(self, block_ids: Mapping[TierBlock, int]) -> None:
        """Begins to copy each into a block of the pool, which nobody uses until its load has ended:
        `loaded` returns it, or `cancel` is true. The first counts as used least recently."""

    def loaded(self) -> Iterable[Loaded]:
        """The loads that have ended since the last call."""

    def cancel(self, block: TierBlock) -> bool:
        """Whether its load has ended with this call, which will not be in `loaded` then. False
        where it is just being copied: it ends soon."""

    def load_s(self, blocks: Sequence[TierBlock]) -> float:
        """How long it would take from now to load these. Those that are nowhere count as if they
        were in the quickest place."""

    def decline(self) -> None:
        """A load was not begun because of `load_s`."""

    def flush(self) -> None:
        """Returns when what was stored is where it goes, or cannot be brought there in a few
        seconds."""

    def stats(self) -> TierStats:
        """As far as the tier knows them."""
