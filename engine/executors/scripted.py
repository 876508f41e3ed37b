"""`ScriptedExecutor`: deterministic tokens without a model, through a real paged KV pool.

The pool holds, where a model keeps keys and values, each position's token id and a digest of all
tokens up to it. A sampled id is a function of the seed and of the pool's content, read through the
block table as attention would. So a block that is shared, copied, reused or evicted at the wrong
moment changes the output, and a test that compares ids fails.

The outputs of a prompt come from the pool too. At a position where a greedy answer would have
the id b, the id (b + i) modulo the vocabulary has rank i + 1 and the logprob -i, so that the
greedy id has rank 1 and the logprob 0. The state of a position is `HIDDEN_SIZE` numbers in
[-0.5, 0.5), derived from the digest of all ids up to it.

A token of an insert is written as a number made of the insert's digest and of the token's place in
it, once it is encoded, which takes as many slices as it has operations.
"""

import struct
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.engine.encoders.inserts import InsertTable
from penstock.engine.memory.pool.kv_memory import KVMemory
from penstock.engine.memory.tiers.disk_tier import BlockMemory
from penstock.engine.sampling.grammar_table import GrammarTable
from penstock.engine.step.executor import (
    CompletedStep,
    PendingTokens,
    block_copies,
    check_no_adapter,
)
from penstock.engine.step.model_info import EncoderInfo, ModelInfo
from penstock.scheduler.cache.journal import BlockJournal
from penstock.scheduler.cache.tier import BlockTier
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.prompt_logprobs import PackedLogprobs, PromptLogprobs
from penstock.scheduler.step_model.amounts import AttentionGroup
from penstock.scheduler.types import (
    FinishReason,
    FurtherTokens,
    Insert,
    Pooling,
    PromptOutput,
    Request,
    RequestId,
    SampledTokens,
    ScheduledBatch,
    SlotAssignment,
    TokenLogprobs,
)

HIDDEN_SIZE = 16  # numbers in an embedding
_ENCODER = EncoderInfo(
    weight_bytes=0, flops_per_patch=0, flops_per_pair=0, bytes_per_token=0, max_patches=1 << 16
)
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(state: int, value: int) -> int:
    """A round of splitmix64 over both. Source: Steele et al. 2014 (doi:10.1145/2660193.2660195)."""
    z = (state ^ (value * _MIX)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class _Pool(NamedTuple):
    """A group of layers has, by place, the token written there and the digest up to it; or with a
    recurrence, by state, how many tokens it has seen and the digest of these."""

    ids: Any
    digests: Any


class _PoolBytes:
    """See `penstock.engine.memory.tiers.disk_tier.BlockMemory`."""

    def __init__(self, pools: list[_Pool], sizes: list[int]) -> None:
        """sizes: of each pool, the places of a block."""
        self._pools = pools
        self._sizes = sizes
        self._forms = [struct.Struct(f"<{size}q{size}Q") for size in sizes]

    def num_bytes(self, group: int) -> int:
        return self._forms[group].size

    def read(self, group: int, block_id: int) -> memoryview:
        here, (ids, digests) = self._range(group, block_id), self._pools[group]
        return memoryview(self._forms[group].pack(*ids[here], *digests[here]))

    def reach(self, group: int, block_id: int) -> None:
        pass

    def write(self, group: int, block_id: int, content: memoryview) -> None:
        here, (ids, digests) = self._range(group, block_id), self._pools[group]
        size, numbers = self._sizes[group], self._forms[group].unpack(content)
        for place, token_id, digest in zip(
            range(here.start, here.stop), numbers[:size], numbers[size:], strict=True
        ):
            ids[place], digests[place] = token_id, digest

    def _range(self, group: int, block_id: int) -> slice:
        size = self._sizes[group]
        return slice(block_id * size, (block_id + 1) * size)


class Slot:
    """The per-slot tables of a device, for one slot."""

    def __init__(self, assignment: SlotAssignment) -> None:
        self.token_ids = dict(enumerate(assignment.token_ids))
        self.inserts = assignment.inserts
        self.shown = {
            position: shown_id(each, position)
            for each in assignment.inserts
            for position in range(each.start, each.end)
        }
        self.length = len(assignment.token_ids)  # of those that are known, without drafts
        self.tables = [list(block_ids) for block_ids in assignment.tables]
        self.num_prompt_tokens = assignment.num_prompt_tokens
        self.sampling = assignment.sampling
        self.seed = assignment.seed
        self.prompt_request = assignment.prompt_request
        self.prompt_logprobs: list[PackedLogprobs] = []
        self.state_sums = [0.0] * HIDDEN_SIZE


def shown_id(insert: Insert, position: int) -> int:
    """What stands in the pool in place of the id of a token of an insert."""
    return mix(int.from_bytes(insert.digest[:8], "little"), position - insert.start) >> 1


class _ScriptedEncoding:
    rows = None

    def __init__(self, insert: Insert) -> None:
        assert insert.content or not insert.patches[0], "it has the content"
        self._num_slices = insert.operations

    def run(self, budget_s: float) -> bool:
        """One slice."""
        self._num_slices -= 1
        return self._num_slices <= 0


class _ScriptedEncoder:
    def __init__(self, info: EncoderInfo) -> None:
        self.info = info

    def begin(self, insert: Insert) -> Any:
        return _ScriptedEncoding(insert)


class ScriptedExecutor:
    """Runs batches by arithmetic on token ids.

    token_at: (digest of seed and context, position of the new token) -> its id; by default spread
    over the vocabulary without the first three ids, where special tokens usually are. paranoid:
    read the whole context for every id and not only its end. step_s: the least time from step to
    step. grammars: None for no structured output. kept: memory for the pool. make_tier: of a tier
    below it.
    """

    adapters = None

    def __init__(
        self,
        info: ModelInfo,
        *,
        runs_ahead: bool = False,
        paranoid: bool = False,
        step_s: float = 0.0,
        token_at: Callable[[int, int], int] | None = None,
        grammars: GrammarTable | None = None,
        kept: KVMemory | None = None,
        make_tier: Callable[[BlockMemory], BlockTier] | None = None,
    ) -> None:
        self.info = replace(info, runs_ahead=runs_ahead)
        self._paranoid = paranoid
        self._step_s = step_s
        self._next_step_s = 0.0  # in time.monotonic()
        self._grammars = grammars
        num_words = max(1, info.vocab_size - 3)
        self._token_at = token_at or (lambda digest, _: 3 % info.vocab_size + digest % num_words)
        self._groups = [group for group in info.kv_groups if isinstance(group, KVGroup)]
        nums = [group.num_blocks for group in info.kv_groups]
        self._sizes = [info.block_size] * len(self._groups) + [1] * bool(info.num_states)
        both = list(zip(nums, self._sizes, strict=True))
        self._pools = [_Pool([-1] * (num * size), [0] * (num * size)) for num, size in both]
        self.journals: tuple[BlockJournal, ...] = ()
        if kept:
            maps = kept.map([(num, [(1, 8 * size)] * 2) for num, size in both])
            self._pools = [_Pool(*(view.cast("Q") for view in each.tensors)) for each in maps]
            self.journals = tuple(each.journal for each in maps)
        self.tier = make_tier(_PoolBytes(self._pools, self._sizes)) if make_tier else None
        self._slots: dict[int, Slot] = {}
        encoder = None if info.encoder is None else _ScriptedEncoder(info.encoder)
        self._inserts = InsertTable(encoder)

    def prepare(self, request: Request) -> "Future[Any] | None":
        check_no_adapter(request)
        self._inserts.prepare(request)
        return self._grammars.prepare(request) if self._grammars else None

    def release(self, request_id: RequestId) -> None:
        self._inserts.release(request_id)
        if self._grammars:
            self._grammars.release(request_id)

    def execute(self, batch: ScheduledBatch) -> PendingTokens:
        if self._step_s:
            self._wait_until_due()
        self._apply(batch)
        sampling_slots = [
            s for s, samples in zip(batch.slots, batch.samples, strict=True) if samples
        ]
        if self._grammars:
            self._grammars.start(sampling_slots)
            self._grammars.wait()
        sampled: list[list[int]] = []
        logprobs: list[TokenLogprobs | None] = []
        prompts: list[PromptOutput] = []
        starts = self._starts(batch)
        rows = zip(batch.slots, starts, batch.num_tokens, batch.samples, strict=True)
        # By row: the states that are copies of its own, by how long it is then.
        copies: dict[int, dict[int, int]] = {}
        for row, num, state in batch.snapshots:
            copies.setdefault(row, {})[starts[row] + num] = state
        for row, (slot_id, start, num_tokens, samples) in enumerate(rows):
            slot = self._slots[slot_id]
            drafts = batch.drafts[row] if row < len(batch.drafts) else ()
            length = start + num_tokens - len(drafts)
            self._write(slot, start, num_tokens)
            self._advance(slot, start, length, copies.get(row, {}))
            if slot.prompt_request:
                prompts += self._read_prompt(slot, start, start + num_tokens)
            if samples:
                sampled.append(self._sample_row(slot_id, length, drafts, copies.get(row, {})))
                logprobs.append(self._logprobs(slot, sampled[-1][0]))
        wants_logprobs = any(entry is not None for entry in logprobs)
        failed: dict[int, FinishReason] = {}
        if table := self._grammars:
            constraints = table.constraints(sampling_slots)
            violated = table.advance(sampling_slots, [ids[-1] for ids in sampled], constraints)
            failed = dict.fromkeys(violated, FinishReason.ERROR)
        encoded, encoding_s = self._inserts.encode(batch)
        return CompletedStep(
            SampledTokens(
                step=batch.step,
                token_ids=[ids[0] for ids in sampled],
                logprobs=logprobs if wants_logprobs else None,
                failed=failed,
                prompts=tuple(prompts),
                further={
                    row: self._further(slot_id, ids[1:])
                    for row, (slot_id, ids) in enumerate(zip(sampling_slots, sampled, strict=True))
                    if len(ids) > 1
                },
                encoded=encoded,
                encoding_s=encoding_s,
            )
        )

    def _wait_until_due(self) -> None:
        now_s = time.monotonic()
        time.sleep(max(0.0, self._next_step_s - now_s))
        # From when it was due, so that too long a sleep is made up for; a late step is not.
        self._next_step_s = max(self._next_step_s, now_s) + self._step_s

    def _apply(self, batch: ScheduledBatch) -> None:
        self._inserts.drop(batch)
        for assignment in batch.assignments:
            self._slots[assignment.slot] = Slot(assignment)
            if self._grammars:
                self._grammars.assign(assignment)
        for slot_id, drafts in zip(batch.slots, batch.drafts, strict=False):
            slot = self._slots[slot_id]
            slot.token_ids |= dict(enumerate(drafts, slot.length))
        for slot_id, index, block_id, group in batch.table_updates:
            block_ids = self._slots[slot_id].tables[group]
            block_ids[index : index + 1] = [block_id]
        for group, (pools, size) in enumerate(zip(self._pools, self._sizes, strict=True)):
            for source, target in block_copies(batch.copies, group):
                for pool in pools:
                    pool[target * size : (target + 1) * size] = pool[
                        source * size : (source + 1) * size
                    ]

    def _starts(self, batch: ScheduledBatch) -> list[int]:
        """Where rows start: a decode at its last known token, which the scheduler may not know."""
        starts = list(batch.starts)
        nums_unresolved = batch.num_unresolved or (0,) * batch.num_decodes
        for row, num_unresolved in enumerate(nums_unresolved):
            starts[row] = self._slots[batch.slots[row]].length - 1
            assert 0 <= batch.starts[row] - starts[row] <= num_unresolved, f"row {row} of {batch}"
        return starts

    def _write(self, slot: Slot, start: int, num_tokens: int) -> None:
        """As a forward pass writes keys and values: each depends on all positions before it."""
        end = start + num_tokens
        for each in slot.inserts:
            if each.start < end and start < each.end:
                self._inserts.rows_of(each)
                assert not each.is_whole or (start <= each.start and each.end <= end), (
                    "in one chunk"
                )
        for group, pool in enumerate(self._pools[: len(self._groups)]):
            for position in range(start, start + num_tokens):
                before = pool.digests[self._place(slot, position - 1, group)] if position else 0
                place = self._place(slot, position, group)
                token_id = slot.shown.get(position, slot.token_ids[position])
                pool.ids[place] = token_id
                pool.digests[place] = mix(before, token_id + 1)

    def _advance(self, slot: Slot, start: int, end: int, copies: Mapping[int, int]) -> None:
        """As a recurrence changes a sequence's state, and copies are made of it on the way. copies:
        states by how many tokens they have seen."""
        if not self.info.num_states:
            return
        lengths, digests = self._pools[-1]
        own = slot.tables[len(self._groups)][0]
        if start == 0:
            lengths[own], digests[own] = 0, 0
        assert lengths[own] == start, f"the state is that of {lengths[own]} tokens, not {start}"
        for position in range(start, end):
            lengths[own] = position + 1
            token_id = slot.shown.get(position, slot.token_ids[position])
            digests[own] = mix(digests[own], token_id + 1)
            if (state := copies.get(position + 1)) is not None:
                lengths[state], digests[state] = lengths[own], digests[own]

    def _sample_row(
        self, slot_id: int, length: int, drafts: tuple[int, ...], copies: Mapping[int, int]
    ) -> list[int]:
        """The id after so many tokens, and those after each draft that is right."""
        ids = [self._sample(slot_id, length)]
        for number, draft in enumerate(drafts, start=1):
            if ids[-1] != draft or draft in self._slots[slot_id].sampling.stop_token_ids:
                break
            if table := self._grammars:
                table.advance([slot_id], ids[-1:], table.constraints([slot_id]))
                table.start([slot_id])
                table.wait()
            self._advance(self._slots[slot_id], length + number - 1, length + number, copies)
            ids.append(self._sample(slot_id, length + number))
        return ids

    def _sample(self, slot_id: int, length: int) -> int:
        slot = self._slots[slot_id]
        digest = self._digest(slot, length)
        if self.info.num_states:
            own = slot.tables[len(self._groups)][0]
            lengths, digests = self._pools[-1]
            assert lengths[own] == length
            digest = mix(digest, digests[own])
        if slot.sampling.temperature > 0:
            digest = mix(digest, slot.seed)
        token_id = self._token_at(digest, length)
        if self._grammars and self._grammars.is_constrained(slot_id):
            token_id = self._grammars.choose(slot_id, token_id, digest)
        slot.token_ids[length] = token_id
        slot.length = length + 1
        return token_id

    def _digest(self, slot: Slot, length: int) -> int:
        """Returns the digest of its first `length` tokens, as the pool has them."""
        if not self._paranoid:
            written: int = self._pools[0].digests[self._place(slot, length - 1)]
            return written
        digest = 0
        for index, (group, pool) in enumerate(zip(self._groups, self._pools, strict=False)):
            for position in range(group.first_read(length - 1), length):
                digest = mix(digest, pool.ids[self._place(slot, position, index)] + 1)
        return digest

    def _read_prompt(self, slot: Slot, start: int, end: int) -> list[PromptOutput]:
        """Collects outputs of the positions just written; returns them where the prompt ends."""
        assert slot.prompt_request
        num_prompt, (num_top, pooling) = slot.num_prompt_tokens, slot.prompt_request
        if num_top is not None:
            positions = range(start + 1, min(end, num_prompt - 1) + 1)
            rows = (self._score(slot, position, num_top) for position in positions)
            slot.prompt_logprobs.append(PackedLogprobs.of(rows))
        for position in range(start, end):
            one = 0 if pooling is Pooling.FIRST else num_prompt - 1
            if pooling is Pooling.MEAN or (pooling and position == one):
                state = _state(self._digest(slot, position + 1))
                slot.state_sums = [a + b for a, b in zip(slot.state_sums, state, strict=True)]
        if end < num_prompt:
            return []
        slot.prompt_request = None
        count = num_prompt if pooling is Pooling.MEAN else 1
        return [
            PromptOutput(
                PackedLogprobs.joined(slot.prompt_logprobs) if num_top is not None else None,
                _floats([x / count for x in slot.state_sums]) if pooling else None,
            )
        ]

    def _score(self, slot: Slot, position: int, num_top: int) -> PromptLogprobs:
        """Scores the token at `position`, given those before it."""
        vocab_size = self.info.vocab_size
        best = self._token_at(self._digest(slot, position), position)
        distance = (slot.token_ids[position] - best) % vocab_size
        top = tuple(((best + i) % vocab_size, float(-i)) for i in range(min(num_top, vocab_size)))
        return PromptLogprobs(float(-distance), distance + 1, top)

    def _place(self, slot: Slot, position: int, group: int = 0) -> int:
        size = self.info.block_size
        return slot.tables[group][position // size] * size + position % size

    def _further(self, slot_id: int, token_ids: list[int]) -> FurtherTokens:
        found = [self._logprobs(self._slots[slot_id], each) for each in token_ids]
        return FurtherTokens(token_ids, [each for each in found if each] or None)

    def _logprobs(self, slot: Slot, token_id: int) -> TokenLogprobs | None:
        """The sampled id has probability 1."""
        num_top = slot.sampling.num_logprobs
        if num_top is None:
            return None
        return TokenLogprobs(0.0, ((token_id, 0.0),) if num_top else ())


def _state(digest: int) -> list[float]:
    return [mix(digest, i) / 2**64 - 0.5 for i in range(HIDDEN_SIZE)]


def _floats(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def scripted_info(
    *,
    vocab_size: int = 512,
    max_model_len: int = 2048,
    block_size: int = 16,
    num_blocks: int = 4096,
    windows: tuple[int | None, ...] = (None,),
    more_blocks: tuple[int, ...] = (),
    eos_token_ids: tuple[int, ...] = (2,),
    num_states: int = 0,
    takes_images: bool = False,
) -> ModelInfo:
    """The `ModelInfo` of no model: a vocabulary and blocks, and no weights.

    windows: of groups of layers, whose pools have num_blocks, then more_blocks. num_states: where
    it has layers with a recurrence, too.
    """
    return ModelInfo(
        architecture="scripted",
        dtype="none",
        kv_cache_dtype="none",
        device="cpu",
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        pooled_size=HIDDEN_SIZE,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        eos_token_ids=eos_token_ids,
        num_parameters=0,
        weight_bytes=0,
        attention=tuple(
            AttentionGroup(window=window, kv_bytes_per_token=0, flops_per_pair=0)
            for window in windows
        ),
        flops_per_token=0,
        flops_per_sampled_token=0,
        load_seconds={},
        more_blocks=more_blocks,
        read_alignment=1,
        num_states=num_states,
        encoder=_ENCODER if takes_images else None,
    )
