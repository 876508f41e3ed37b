"""Joins blocks and digests: is there room for the tokens of a sequence, and which are cached?

A model's layers are in one or more groups (`scheduler.groups`), each with a pool and, for
each sequence, a table of its own. What a sequence can continue from must be in all of them.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from penstock.scheduler.cache.group_cache import GroupCache, Share
from penstock.scheduler.cache.journal import BlockJournal
from penstock.scheduler.cache.kv_events import KVEvents
from penstock.scheduler.cache.prefix import PROCESS_KEY, block_digests, root_digest
from penstock.scheduler.cache.sequence import Sequence, Status
from penstock.scheduler.cache.state_cache import OPENING, StateCache
from penstock.scheduler.cache.tier import BlockTier, TierBlock
from penstock.scheduler.groups import KVGroup, StateGroup
from penstock.scheduler.types import BlockCopy, StateSnapshot, TableUpdate

# After how many of the blocks with these digests, up to a number, a sequence can continue.
_LongestUntil = Callable[[Items[bytes], int], int]


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting sequence needs this of each group; its first num_computed tokens are computed.

    num_stateless: of the tokens after those, the ones whose keys and values were found, but no
    recurrent state after them.
    """

    num_computed: int
    shares: list[Share]
    num_stateless: int = 0


class KVCache:
    """The blocks of every sequence.

    With journals, one for each group, blocks that an earlier engine computed are findable too, each
    once its content has been verified. A tier gets the blocks that sequences give back; if there
    are journals too, its key is theirs.
    """

    def __init__(
        self,
        groups: Items[KVGroup | StateGroup],
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
        self._key = used[0].key if used and used[0] else PROCESS_KEY
        if tier is not None:
            assert not used or self._key == tier.key, "journals have the key of the tier"
            self._key = tier.key
        self._events = events if enable_prefix_caching else None
        self.groups: list[GroupCache | StateCache] = []
        for i, group in enumerate(groups):
            more = used[i] if used else None, tier, self._events, i
            if isinstance(group, StateGroup):
                self.groups.append(StateCache(group, block_size, *more))
            else:
                self.groups.append(GroupCache(group, block_size, *more))
        # Those of keys and values, which come first, and those of states, each with its number.
        self.blocks = [each for each in self.groups if isinstance(each, GroupCache)]
        self._with_blocks = list(enumerate(self.blocks))
        self._states = [
            (i, each) for i, each in enumerate(self.groups) if isinstance(each, StateCache)
        ]
        self._windowed = [
            (i, each) for i, each in self._with_blocks if each.group.window is not None
        ]
        self.has_windows = bool(self._windowed)
        self.has_states = bool(self._states)

    @property
    def num_available(self) -> int:
        """Blocks that can be taken in every group of keys and values."""
        return min([each.num_available for each in self.blocks])

    def plan(self, sequence: Sequence) -> Admission:
        """Says what it takes to admit this sequence, with blocks for all its known tokens, or as
        many as its groups need at once.

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
        digests, num_stateless = self._find_prefix(sequence)
        num_computed = len(digests) * self.block_size
        shares = [each.share(digests, num_computed, num_tokens, None) for each in self.groups]
        return Admission(num_computed, shares, num_stateless)

    def fits(self, admission: Admission, num_reserved: int) -> bool:
        return all(
            each.fits(share, num_reserved)
            for each, share in zip(self.groups, admission.shares, strict=True)
        )

    def admit(self, sequence: Sequence, admission: Admission) -> list[BlockCopy]:
        """Fills its empty block tables. The blocks must be available."""
        for each in self.groups[len(sequence.tables) :]:
            sequence.tables.append(each.new_table())
        copies = []
        for index, (each, share) in enumerate(zip(self.groups, admission.shares, strict=True)):
            table = sequence.tables[index]
            each.admit(table, share)
            if share.copied is not None:
                target = table.block_ids[share.first + len(share.blocks)]
                copies.append(BlockCopy(share.copied, target, group=index))
        if self._enable_prefix_caching:
            num_computed = admission.num_computed
            last = max(0, len(sequence.token_ids) - OPENING) // self.block_size * self.block_size
            wanted = (min(last, num_computed + admission.num_stateless), last)
            for index, states in self._states:
                states.want(sequence.tables[index], wanted, num_computed)
        if self._events is not None:
            self._tell(self._events, sequence, 0, admission.num_computed // self.block_size)
        return copies

    def beyond(self, sequence: Sequence, num_cached: int) -> tuple[list[TierBlock], int]:
        """Returns the blocks to be loaded from the tier so that more of its tokens are cached than
        num_cached, and how many these are then."""
        digests = self._digests(sequence, (len(sequence.token_ids) - 1) // self.block_size)
        reach = [*[each.longest_reach for each in self.groups], *self._outside_whole(sequence)]
        end = _agreed(reach, digests, len(digests))
        if end * self.block_size <= num_cached:
            return [], num_cached
        blocks = [
            TierBlock(group, digest)
            for group, each in enumerate(self.groups)
            for digest in each.missing(digests[:end])
        ]
        return blocks, end * self.block_size

    def has_room(self, blocks: Items[TierBlock]) -> bool:
        """Whether they can be taken to be loaded."""
        nums = Counter(block.group for block in blocks)
        return all(num <= self.groups[group].num_available for group, num in nums.items())

    def refresh(self, admission: Admission) -> None:
        """The cached blocks of a sequence that is to be admitted are evicted after all others, the
        last first."""
        for each, share in zip(self.groups, admission.shares, strict=True):
            for block_id in reversed(share.blocks):
                each.evict_last(block_id)

    def snapshots_in_chunk(
        self, sequence: Sequence, row: int, num_tokens: int
    ) -> list[StateSnapshot]:
        """Those to be taken by a step that computes its next num_tokens tokens, in this row."""
        start = sequence.num_computed
        return [
            StateSnapshot(row, position - start, state)
            for index, each in self._states
            for position, state in each.snapshots(sequence.tables[index], start, start + num_tokens)
        ]

    def snapshots_in_decodes(
        self, sequences: Items[Sequence], drafts: Items[Items[int]] = ()
    ) -> list[StateSnapshot]:
        """Those to be taken by a step in whose rows these run one token each, already counted as
        computed, and after it the drafts: of a row with several ends of blocks, at the first."""
        snapshots: list[StateSnapshot] = []
        if not self._enable_prefix_caching:
            return snapshots
        for row, sequence in enumerate(sequences):
            num_before = -sequence.num_computed % self.block_size  # drafts up to the block's end
            if num_before > (len(drafts[row]) if drafts else 0):
                continue
            position = sequence.num_computed + num_before
            for index, each in self._states:
                table = sequence.tables[index]
                state = each.answer_snapshot(table, position, is_draft=num_before > 0)
                if state is not None:
                    snapshots.append(StateSnapshot(row, 1 + num_before, state))
        return snapshots

    def grow(self, sequence: Sequence, num_tokens: int, updates: list[TableUpdate]) -> None:
        """Appends blocks to its tables, as many as so many tokens need."""
        for index, each in self._with_blocks:
            table = sequence.tables[index]
            while len(table.block_ids) * self.block_size < num_tokens:
                position = len(table.block_ids)
                updates.append(TableUpdate(sequence.slot, position, each.append(table), index))

    def num_owned(self, sequence: Sequence) -> int:
        """Blocks that its tables have, in every group of keys and values."""
        return min([len(sequence.tables[index].block_ids) for index, _ in self._with_blocks])

    def may_go_on(self, sequence: Sequence) -> bool:
        """Whether its next token may have a block, in a group with a window: it gets one for those
        that it gives back, which it knows once its drafts are resolved."""
        num_owned = self.num_owned(sequence) * self.block_size
        return not sequence.num_unresolved or sequence.num_computed < num_owned

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
            each.slide(sequence.tables[index], sequence.num_computed - sequence.num_unresolved)

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
        for each, table in zip(self.groups, tables, strict=True):
            each.cache(table, digests, root)
        if self._events is not None:
            self._tell(self._events, sequence, start, num_full)

    def record(self, completed: int, launched: int) -> None:
        """The step `completed` has, and `launched` is the last one that was launched. Findable
        blocks that only steps up to the first wrote to may outlive this engine; those of sequences
        that failed in them are forgotten by now."""
        for each in self.groups:
            each.record(completed, launched)

    def forget(self, sequence: Sequence) -> None:
        """Makes its blocks unfindable, those too that it gave back, or had before it was preempted:
        no other sequence shall use what they hold."""
        for index, each in enumerate(self.groups):
            if index < len(sequence.tables):
                each.forget(sequence.tables[index], sequence.block_digests)

    def release(self, sequence: Sequence) -> None:
        for each, table in zip(self.groups, sequence.tables, strict=True):
            each.release(table)

    def _can_fork(self, parent: Sequence, child: Sequence) -> bool:
        """The parent's prompt was computed by an earlier step, the child has no output yet, and the
        parent still has what the child reads: a recurrent state has gone on, so there the child
        continues from a snapshot, as any other sequence.

        Copies are made before a step computes anything, so not in the step that computes it.
        """
        return (
            not self._states
            and parent.status is Status.DECODING
            and len(child.token_ids) == child.num_prompt_tokens
            and not any(
                each.is_whole and each.end >= child.num_prompt_tokens
                for each in child.request.inserts[-1:]
            )
            and all(
                each.may_share(parent.tables[index], child.num_prompt_tokens - 1)
                for index, each in self._windowed
            )
        )

    def _find_prefix(self, sequence: Sequence) -> tuple[list[bytes], int]:
        """The digests of the longest run of cached blocks that its tokens, without the last, begin
        with; and how many more tokens' blocks were found, but no state after them.

        None where its whole prompt must run: then it writes blocks of its own.
        """
        if not self._enable_prefix_caching or sequence.needs_whole_prompt:
            return [], 0
        digests = self._digests(sequence, (len(sequence.token_ids) - 1) // self.block_size)
        whole = self._outside_whole(sequence)
        hits = [*[each.longest_hit for each in self.blocks], *whole]
        num_found = _agreed(hits, digests, len(digests))
        if not self._states:
            return digests[:num_found], 0
        end = _agreed([*[each.longest_hit for each in self.groups], *whole], digests, num_found)
        return digests[:end], (num_found - end) * self.block_size

    def _outside_whole(self, sequence: Sequence) -> list[_LongestUntil]:
        """How many blocks end before, and not inside, an insert that is computed in one chunk."""
        inserts = [each for each in sequence.request.inserts if each.is_whole]

        def longest(_: Items[bytes], end: int) -> int:
            for each in inserts:
                if each.start < end * self.block_size < each.end:
                    return each.start // self.block_size
            return end

        return [longest] if inserts else []

    def _digests(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """The digests of its first blocks, each computed once in the sequence's life."""
        digests, size = sequence.block_digests, self.block_size
        if len(digests) < num_blocks:
            parent = digests[-1] if digests else self._root(sequence)
            start, inserts = len(digests) * size, sequence.request.inserts
            token_ids = sequence.token_ids[start : num_blocks * size]
            digests += block_digests(parent, token_ids, size, self._key, inserts, start)
        return digests[:num_blocks]

    def _tell(self, events: KVEvents, sequence: Sequence, start: int, end: int) -> None:
        end = min(end, len(sequence.block_digests))  # a fork has no digests yet
        for group, each in enumerate(self.groups):
            events.tell(group, sequence, start, end, each.find)

    def _root(self, sequence: Sequence) -> bytes:
        return root_digest(sequence.request.cache_salt, sequence.request.adapter, self._key)


def _agreed(longest: Items[_LongestUntil], digests: Items[bytes], end: int) -> int:
    """After how many blocks, up to `end`, a sequence can continue in all groups; each is asked by
    one of these."""
    num_agreed = index = 0
    # Each group may shorten it, until all of them in a row leave it as it is.
    while num_agreed < len(longest):
        found = longest[index](digests, end)
        num_agreed = num_agreed + 1 if found == end else 1
        end, index = found, (index + 1) % len(longest)
    return end
