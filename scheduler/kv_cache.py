"""Joins blocks and digests: is there room for the tokens of a sequence, and which are cached?

A model's layers are in one or more groups (`penstock.scheduler.groups`), each with a pool and, for
each sequence, a table of its own. What a sequence can continue from must be in all of them.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from penstock.scheduler.blocks import BlockTable
from penstock.scheduler.group_cache import GroupCache, Share
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.journal import BlockJournal
from penstock.scheduler.kv_events import KVEvents
from penstock.scheduler.prefix import PROCESS_KEY, block_digest, root_digest
from penstock.scheduler.sequence import Sequence, Status
from penstock.scheduler.stats import GroupBlocks
from penstock.scheduler.tier import BlockTier, TierBlock
from penstock.scheduler.types import BlockCopy, TableUpdate


@dataclass(frozen=True, slots=True)
class Admission:
    """What a waiting sequence needs of each group; its first num_computed tokens are computed."""

    num_computed: int
    shares: list[Share]


class KVCache:
    """The blocks of every sequence.

    With journals, one for each group, blocks that an earlier engine computed are findable too, each
    once its content has been verified. A tier gets the blocks that sequences give back; if there
    are journals too, its key is theirs.
    """

    def __init__(
        self,
        groups: Items[KVGroup],
        block_size: int,
        enable_prefix_caching: bool,
        journals: Items[BlockJournal] = (),
        tier: BlockTier | None = None,
        events: KVEvents | None = None,
    ) -> None:
        self.block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        used: Items[BlockJournal | None] = journals if enable_prefix_caching else ()
        self._has_journals = bool(used)
        self._key = PROCESS_KEY
        if used and used[0]:
            self._key = used[0].key
        if tier is not None:
            assert not used or self._key == tier.key, "journals have the key of the tier"
            self._key = tier.key
        each_used = used or (None,) * len(groups)
        self.groups = [
            GroupCache(group, block_size, journal, tier, events, number)
            for number, (group, journal) in enumerate(zip(groups, each_used, strict=True))
        ]
        self._events = events if enable_prefix_caching else None
        self._first, *self._others = self.groups
        self._windowed = [
            (index, cache)
            for index, cache in enumerate(self.groups)
            if cache.group.window is not None
        ]
        self.has_windows = bool(self._windowed)

    def stats(self) -> list[GroupBlocks]:
        return [each.stats() for each in self.groups]

    @property
    def num_available(self) -> int:
        """Blocks that can be taken in every group."""
        num = self._first.num_available
        return min(num, *[each.num_available for each in self._others]) if self._others else num

    def plan(self, sequence: Sequence) -> Admission:
        """What admitting this sequence takes, with blocks for all its known tokens, or as many as
        its groups need at once.

        At least its last token is left to compute: even a fully cached prompt needs one query row
        to produce logits.
        """
        num_tokens = len(sequence.token_ids)
        parent = sequence.fork_parent
        if parent is not None and self._can_fork(parent, sequence):
            # It shares the blocks before the prompt's last token, which it computes again, and
            # writes that token and its outputs into a block of its own: copy-on-write, at once.
            num_computed = sequence.num_prompt_tokens - 1
            tables = zip(self.groups, parent.tables, strict=True)
            shares = [each.share((), num_computed, num_tokens, table) for each, table in tables]
            return Admission(num_computed, shares)
        digests = self._find_prefix(sequence)
        num_computed = len(digests) * self.block_size
        shares = [each.share(digests, num_computed, num_tokens, None) for each in self.groups]
        return Admission(num_computed, shares)

    def fits(self, admission: Admission, num_reserved: int) -> bool:
        """Whether each group has what it takes and num_reserved blocks besides."""
        return all(
            share.num_claimed + num_reserved <= each.num_available
            for each, share in zip(self.groups, admission.shares, strict=True)
        )

    def admit(self, sequence: Sequence, admission: Admission) -> list[BlockCopy]:
        """Fills its empty block tables. The blocks must be available."""
        while len(sequence.tables) < len(self.groups):
            sequence.tables.append(BlockTable())
        copies = []
        for index, (each, share) in enumerate(zip(self.groups, admission.shares, strict=True)):
            table = sequence.tables[index]
            each.admit(table, share)
            if share.copied is not None:
                target = table.block_ids[share.first + len(share.blocks)]
                copies.append(BlockCopy(share.copied, target, group=index))
        if self._events is not None:
            self._tell(self._events, sequence, 0, admission.num_computed // self.block_size)
        return copies

    def beyond(self, sequence: Sequence, num_cached: int) -> tuple[list[TierBlock], int]:
        """What is to be loaded from the tier so that more of its tokens are cached than num_cached,
        and how many these are then."""
        digests = self._digests(sequence, (len(sequence.token_ids) - 1) // self.block_size)
        end = self._agreed(digests, [each.longest_reach for each in self.groups])
        if end * self.block_size <= num_cached:
            return [], num_cached
        blocks = [
            TierBlock(group, digest)
            for group, each in enumerate(self.groups)
            for digest in each.missing(digests[:end])
        ]
        return blocks, end * self.block_size

    def refresh(self, admission: Admission) -> None:
        """The cached blocks of a sequence that is to be admitted are evicted after all others."""
        for each, share in zip(self.groups, admission.shares, strict=True):
            each.refresh(share.blocks)

    def grow(self, sequence: Sequence, num_tokens: int, updates: list[TableUpdate]) -> None:
        """Appends blocks to its tables, as many as so many tokens need."""
        for index, each in enumerate(self.groups):
            table = sequence.tables[index]
            while len(table.block_ids) * self.block_size < num_tokens:
                position = len(table.block_ids)
                updates.append(TableUpdate(sequence.slot, position, each.append(table), index))

    def num_coverable(self, sequence: Sequence) -> int:
        """How many tokens after those computed there are blocks for, in groups with a window: in
        others, it has had them since its admission."""
        return min(
            (len(sequence.tables[index].block_ids) + each.num_available) * self.block_size
            - sequence.num_computed
            for index, each in self._windowed
        )

    def slide(self, sequence: Sequence) -> None:
        """Gives back what its next token does not read. A step that runs may still read it, so it
        must not be written to before that step is done."""
        for index, each in self._windowed:
            each.slide(sequence.tables[index], sequence.num_computed)

    def trim(self, sequence: Sequence) -> None:
        """Frees the blocks at the end of its tables that hold none of its computed tokens."""
        for each, table in zip(self.groups, sequence.tables, strict=True):
            each.trim(table, sequence.num_computed)

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Makes full blocks findable whose tokens are known and computed by launched steps."""
        if not self._enable_prefix_caching:
            return
        num_full = min(sequence.num_computed, len(sequence.token_ids)) // self.block_size
        tables = sequence.tables
        if tables[0].num_cached >= num_full:
            return
        digests, start = self._digests(sequence, num_full), tables[0].num_cached
        root = self._root(sequence) if self._has_journals else b""
        self._first.cache(tables[0], digests, root)
        for each, table in zip(self._others, tables[1:], strict=True):
            each.cache(table, digests, root)
        if self._events is not None:
            self._tell(self._events, sequence, start, num_full)

    def record(self) -> None:
        """The step that was launched last has completed, so its findable blocks may outlive this
        engine. Those of sequences that failed are forgotten by now."""
        for each in self.groups:
            each.record()

    def forget(self, sequence: Sequence) -> None:
        """Makes its blocks unfindable, those too that it gave back, or had before it was preempted:
        no other sequence shall use what they hold."""
        for index, each in enumerate(self.groups):
            if index < len(sequence.tables):
                each.forget(sequence.tables[index], sequence.block_digests)

    def release(self, sequence: Sequence) -> None:
        """Releases all its blocks, the last first. Cached ones become evictable, others free."""
        for each, table in zip(self.groups, sequence.tables, strict=True):
            each.release(table)

    def _can_fork(self, parent: Sequence, child: Sequence) -> bool:
        """The parent's prompt was computed by an earlier step, the child has no output yet, and the
        parent still has what the child reads.

        Copies are made before a step computes anything, so not in the step that computes it.
        """
        return (
            parent.status is Status.DECODING
            and len(child.token_ids) == child.num_prompt_tokens
            and all(
                each.may_share(parent.tables[index], child.num_prompt_tokens - 1)
                for index, each in self._windowed
            )
        )

    def _find_prefix(self, sequence: Sequence) -> list[bytes]:
        """The digests of the longest run of cached blocks that its tokens, without the last, begin
        with.

        None where its whole prompt must run: then it writes blocks of its own.
        """
        if not self._enable_prefix_caching or sequence.needs_whole_prompt:
            return []
        digests = self._digests(sequence, (len(sequence.token_ids) - 1) // self.block_size)
        return digests[: self._agreed(digests, [each.longest_hit for each in self.groups])]

    def _agreed(
        self, digests: list[bytes], longest: list[Callable[[list[bytes], int], int]]
    ) -> int:
        """After how many blocks a sequence can continue in all groups."""
        end, num_agreed, index = len(digests), 0, 0
        # Each group may shorten it, until all of them in a row leave it as it is.
        while num_agreed < len(longest):
            found = longest[index](digests, end)
            num_agreed = num_agreed + 1 if found == end else 1
            end, index = found, (index + 1) % len(longest)
        return end

    def _digests(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """The digests of its first blocks, each computed once in the sequence's life."""
        digests, size = sequence.block_digests, self.block_size
        for i in range(len(digests), num_blocks):
            parent = digests[-1] if digests else self._root(sequence)
            token_ids = sequence.token_ids[i * size : (i + 1) * size]
            digests.append(block_digest(parent, token_ids, self._key))
        return digests[:num_blocks]

    def _tell(self, events: KVEvents, sequence: Sequence, start: int, end: int) -> None:
        end = min(end, len(sequence.block_digests))  # a fork has no digests yet
        for group, each in enumerate(self.groups):
            events.tell(group, sequence, start, end, each.is_findable)

    def _root(self, sequence: Sequence) -> bytes:
        return root_digest(sequence.request.cache_salt, sequence.request.adapter, self._key)
