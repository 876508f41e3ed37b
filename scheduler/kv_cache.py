"""Joins blocks and digests: is there room for the tokens of a sequence, and which are cached?"""

from dataclasses import dataclass

from penstock.scheduler.blocks import BlockAllocator
from penstock.scheduler.journal import BlockJournal, StoredBlock
from penstock.scheduler.prefix import PROCESS_KEY, PrefixIndex, block_digest, root_digest
from penstock.scheduler.sequence import Sequence, Status
from penstock.scheduler.types import BlockCopy


@dataclass(frozen=True, slots=True)
class Admission:
    """The blocks that a waiting sequence needs; none is taken before `KVCache.admit`.

    shared: computed blocks that it references too. copied: a computed block whose tokens up to
    num_computed it needs, but which it will write to, so it gets a copy. num_new: blocks to take,
    the copy's included. num_claimed: blocks that stop being available: num_new, and those of
    `shared` that are evictable now.
    """

    shared: list[int]
    copied: int | None
    num_computed: int
    num_new: int
    num_claimed: int


class KVCache:
    """The blocks of every sequence. `num_available` counts those that can be taken: free and
    evictable.

    With a journal, blocks that an earlier engine computed are findable too, each once its content
    has been verified.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        journal: BlockJournal | None = None,
    ) -> None:
        self.block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._journal = journal if enable_prefix_caching else None
        self._key = self._journal.key if self._journal else PROCESS_KEY
        survivors = self._journal.survivors() if self._journal else ()
        self._unverified = {block.block_id for block in survivors}
        self._unrecorded: list[StoredBlock] = []  # of the step that runs
        self._allocator = BlockAllocator(num_blocks, self._unverified)
        self._index = PrefixIndex()
        for block in survivors:
            is_new = self._index.add(block.digest, block.block_id)
            assert is_new, f"the journal has {block} twice"
            self._index.make_evictable(block.block_id)

    @property
    def num_blocks(self) -> int:
        return self._allocator.num_blocks

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    @property
    def num_evictable(self) -> int:
        return self._index.num_evictable

    @property
    def num_available(self) -> int:
        return self._allocator.num_free + self._index.num_evictable

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def plan(self, sequence: Sequence) -> Admission:
        """What admitting this sequence takes, with blocks for all its known tokens.

        At least its last token is left to compute: even a fully cached prompt needs one query row
        to produce logits.
        """
        parent = sequence.fork_parent
        if parent is not None and self._can_fork(parent, sequence):
            return self._plan_fork(parent, sequence)
        shared = self._find_prefix(sequence)
        return self._admission(sequence, shared, None, len(shared) * self.block_size)

    def admit(self, sequence: Sequence, admission: Admission) -> list[BlockCopy]:
        """Fills the empty block table for all known tokens. The blocks must be available."""
        assert not sequence.table.block_ids
        for block_id in admission.shared:
            self._allocator.share(block_id)
            self._index.touch(block_id)
        sequence.table.block_ids = list(admission.shared)
        sequence.table.num_cached = len(admission.shared)
        for _ in range(admission.num_new):
            self.append_block(sequence)
        if admission.copied is None:
            return []
        return [BlockCopy(admission.copied, sequence.table.block_ids[len(admission.shared)])]

    def append_block(self, sequence: Sequence) -> int:
        """Appends a block to its table: a free one, else the least recently used evictable one."""
        block_id = self._allocator.take()
        if block_id is None:
            evicted = self._index.evict()
            assert evicted is not None, "no block is available; the scheduler must check before"
            self._erase(evicted)
            self._allocator.free(evicted)
            block_id = self._allocator.take()
            assert block_id is not None
        sequence.table.block_ids.append(block_id)
        return block_id

    def trim(self, sequence: Sequence) -> None:
        """Frees the blocks at the end of its table that hold none of its computed tokens."""
        block_ids = sequence.table.block_ids
        while len(block_ids) * self.block_size >= sequence.num_computed + self.block_size:
            block_id = block_ids.pop()
            is_last = self._allocator.release(block_id)
            assert is_last, f"block {block_id} was to be written to, but it is shared"
            self._allocator.free(block_id)

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Makes full blocks findable whose tokens are known and computed by launched steps."""
        if not self._enable_prefix_caching:
            return
        table = sequence.table
        num_full = min(sequence.num_computed, len(sequence.token_ids)) // self.block_size
        if table.num_cached >= num_full:
            return
        digests = self._digests(sequence, num_full)
        for i in range(table.num_cached, num_full):
            if self._index.add(digests[i], table.block_ids[i]) and self._journal:
                parent = digests[i - 1] if i else self._root(sequence)
                self._unrecorded.append(StoredBlock(table.block_ids[i], digests[i], parent))
        table.num_cached = num_full

    def record(self) -> None:
        """The step that was launched last has completed, so its findable blocks may outlive this
        engine. Those of sequences that failed are forgotten by now."""
        if self._unrecorded:
            assert self._journal
            blocks, self._unrecorded = self._unrecorded, []
            find = self._index.find
            self._journal.record([b for b in blocks if find(b.digest) == b.block_id])

    def forget(self, sequence: Sequence) -> None:
        """Makes its blocks unfindable, those too that it had before it was preempted: no other
        sequence shall use what they hold."""
        for block_id in sequence.table.block_ids:
            self._forget(block_id)
        for digest in sequence.block_digests:
            if (found := self._index.find(digest)) is not None:
                self._forget(found)

    def release(self, sequence: Sequence) -> None:
        """Releases all its blocks, the last first. Cached ones become evictable, others free."""
        for block_id in reversed(sequence.table.block_ids):
            if self._allocator.release(block_id):
                if self._index.is_cached(block_id):
                    self._index.make_evictable(block_id)
                else:
                    self._allocator.free(block_id)
        sequence.table.block_ids = []
        sequence.table.num_cached = 0

    def ref_count(self, block_id: int) -> int:
        return self._allocator.ref_count(block_id)

    def _can_fork(self, parent: Sequence, child: Sequence) -> bool:
        """The parent's prompt was computed by an earlier step, and the child has no output yet.

        Copies are made before a step computes anything, so not in the step that computes it.
        """
        return parent.status is Status.DECODING and len(child.token_ids) == child.num_prompt_tokens

    def _plan_fork(self, parent: Sequence, child: Sequence) -> Admission:
        """Shares the blocks before the prompt's last token, which the child computes again.

        It writes that token and its outputs into a block of its own: copy-on-write, done at once.
        """
        num_computed = child.num_prompt_tokens - 1
        num_shared = num_computed // self.block_size
        is_partial = num_computed % self.block_size > 0
        copied = parent.table.block_ids[num_shared] if is_partial else None
        return self._admission(child, parent.table.block_ids[:num_shared], copied, num_computed)

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """The longest run of cached blocks that its tokens, without the last, begin with.

        None where its whole prompt must run: then it writes blocks of its own.
        """
        if not self._enable_prefix_caching or sequence.needs_whole_prompt:
            return []
        found = []
        for digest in self._digests(sequence, (len(sequence.token_ids) - 1) // self.block_size):
            block_id = self._index.find(digest)
            if block_id is None or (block_id in self._unverified and not self._verify(block_id)):
                break
            found.append(block_id)
        return found

    def _verify(self, block_id: int) -> bool:
        """Whether a block of an earlier engine is what it was; if not, it becomes free."""
        assert self._journal
        self._unverified.remove(block_id)
        is_intact = self._journal.is_intact(block_id)
        if not is_intact:
            self._forget(block_id)
        return is_intact

    def _forget(self, block_id: int) -> None:
        if self._index.is_evictable(block_id):
            self._allocator.free(block_id)
        if self._index.is_cached(block_id):
            self._index.forget(block_id)
            self._erase(block_id)

    def _erase(self, block_id: int) -> None:
        """It was findable and is not any more."""
        if self._journal:
            self._unverified.discard(block_id)
            self._journal.erase(block_id)

    def _admission(
        self, sequence: Sequence, shared: list[int], copied: int | None, num_computed: int
    ) -> Admission:
        num_blocks = -(-len(sequence.token_ids) // self.block_size)
        num_new = num_blocks - len(shared)
        num_evictable = sum(self._index.is_evictable(block_id) for block_id in shared)
        return Admission(shared, copied, num_computed, num_new, num_new + num_evictable)

    def _digests(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """The digests of its first blocks, each computed once in the sequence's life."""
        digests, size = sequence.block_digests, self.block_size
        for i in range(len(digests), num_blocks):
            parent = digests[-1] if digests else self._root(sequence)
            token_ids = sequence.token_ids[i * size : (i + 1) * size]
            digests.append(block_digest(parent, token_ids, self._key))
        return digests[:num_blocks]

    def _root(self, sequence: Sequence) -> bytes:
        return root_digest(sequence.request.cache_salt, sequence.request.adapter, self._key)
