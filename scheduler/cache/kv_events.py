"""`KVEvents`: which blocks can be found in the pool, told as it changes.

For routers that send a prompt to where its beginning is. A block is told of when a sequence whose
tokens are known has it, so those that an earlier engine left, or that a tier brings back, are told
of when they are first used.
"""

from collections.abc import Callable
from typing import NamedTuple

from penstock.scheduler.cache.prefix import inserts_within
from penstock.scheduler.cache.sequence import Sequence


class Stored(NamedTuple):
    """Blocks that follow each other can be found. parent: the digest of the one before them, None
    for a prompt's first. token_ids: of all of them. inserts: of each, digests of those that have
    tokens in it, in hexadecimal."""

    group: int
    digests: list[bytes]
    parent: bytes | None
    token_ids: list[int]
    adapter: str | None
    cache_salt: str
    inserts: list[list[str]]


class Removed(NamedTuple):
    """A block that was told of cannot be found any more."""

    group: int
    digest: bytes


KVEvent = Stored | Removed


class KVEvents:
    """One thread uses it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._told: set[tuple[int, bytes]] = set()
        self._events: list[KVEvent] = []

    def tell(
        self,
        group: int,
        sequence: Sequence,
        start: int,
        end: int,
        find: Callable[[bytes], int | None],
    ) -> None:
        """Tells of those of a sequence's blocks from number `start` to `end` that can be found."""
        size, digests = self._block_size, sequence.block_digests
        last: Stored | None = None
        for i in range(start, end):
            digest = digests[i]
            if (group, digest) in self._told or find(digest) is None:
                last = None
                continue
            self._told.add((group, digest))
            token_ids = sequence.token_ids[i * size : (i + 1) * size]
            request = sequence.request
            within = inserts_within(request.inserts, i * size, (i + 1) * size)
            keys = [each.digest.hex() for each, _ in within]
            if last is not None:
                last.digests.append(digest)
                last.token_ids.extend(token_ids)
                last.inserts.append(keys)
                continue
            parent = digests[i - 1] if i else None
            described = request.adapter, request.cache_salt, [keys]
            last = Stored(group, [digest], parent, token_ids, *described)
            self._events.append(last)

    def on_removed(self, group: int, digest: bytes) -> None:
        if (group, digest) in self._told:
            self._told.remove((group, digest))
            self._events.append(Removed(group, digest))

    def take(self) -> list[KVEvent]:
        """Those since the last call, in their order."""
        events, self._events = self._events, []
        return events
