"""`BlockJournal`: what makes a pool of keys and values that outlives its engine of use to the next.

The scheduler says which blocks are complete and which are no longer findable; the journal keeps
that, with a checksum of each block, where the next engine finds it. The scheduler knows neither
bytes nor files.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class StoredBlock(NamedTuple):
    """A full block whose keys and values were written by steps that have completed.

    parent: the digest of the block before it, or of the root.
    """

    block_id: int
    digest: bytes
    parent: bytes


class BlockJournal(Protocol):
    """For an executor that does not run ahead: its steps have completed when `execute` returns."""

    @property
    def key(self) -> bytes:
        """Makes digests mean the same in all engines that use the journal."""

    def survivors(self) -> Sequence[StoredBlock]:
        """Blocks that an earlier engine recorded and did not erase, in the order of their eviction.
        To be read before anything is recorded."""

    def is_intact(self, block_id: int) -> bool:
        """Whether a survivor holds what was recorded. To be asked before it is used."""

    def record(self, blocks: Sequence[StoredBlock]) -> None:
        """They are complete and findable."""

    def erase(self, block_id: int) -> None:
        """It is no longer findable, and may be written to. It need not have been recorded."""
