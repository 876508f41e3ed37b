"""`DraftModel`: a small model whose next tokens are the drafts of a larger one.

Its keys and values are in a pool of its own whose blocks have the numbers of the larger model's, so
the block tables of the sequences are its too. Each block has a tag, the digest of all tokens up to
its end, written once they are computed. Where a sequence that enters a slot finds blocks with the
tags of its own tokens, they need not be computed again; the rest is, when the first draft is
wanted. So a block that is cached, copied, given to another or loaded from a disk is never taken for
what it is not, and prompts without drafts cost nothing.

Drafts go on past the blocks that a sequence has. Each slot has a few spare ones for these; what is
in them is computed again in the block that the sequence gets.

A draft is drawn as the larger model's token will be, by the same random number of the sequence's
seed and the position, after the same penalties and filters: what both models expect alike, they
draw alike. Grammars alone are left to the verification.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.engine.drafting.proposer import Proposals, Proposer, ProposingRow
from penstock.engine.memory.pool.kv_pool import LayerPools
from penstock.engine.native.model import NativeModel
from penstock.engine.sampling.sampler import INVALID_ID, DrawTables, Sampler
from penstock.engine.step.model_input import ModelInput
from penstock.scheduler.types import ScheduledBatch, SlotAssignment

# Tokens of prompts that are computed after one step, so that the next one is not long in coming.
CATCH_UP_TOKENS = 128
# A row has no more new tokens than these where it has had drafts lately.
_FEW = 16


def num_spare_blocks(most: int, block_size: int) -> int:
    """Of a slot, for `most` drafts of a sequence."""
    return -(-most // block_size)


@dataclass(slots=True)
class _Slot:
    """num_owned: blocks that the sequence has. num_valid: tokens from its first one on whose keys
    and values are computed; None where nobody has looked. Those from `length` on are `drafts` that
    may come true. digests: of its full blocks."""

    assignment: SlotAssignment
    num_owned: int
    num_valid: int | None = None
    length: int = 0
    drafts: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Run:
    """A row's tokens [start, end) in a call."""

    row: ProposingRow
    slot: _Slot
    start: int
    end: int
    drafts: list[int] = field(default_factory=list)

    @property
    def samples(self) -> bool:
        return self.end >= self.row.length


class DraftModel(Proposer):
    """See `Proposer`. name: as metrics have it."""

    name = "model"

    def __init__(
        self,
        token_table: Tensor,
        block_table: Tensor,
        *,
        model: NativeModel,
        pool: LayerPools,
        build_input: Callable[[ScheduledBatch, Tensor, Tensor, int], ModelInput],
        vocab_size: int,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        most: int,
    ) -> None:
        """pool: has num_blocks as the larger model has, and then those that are spare, slot after
        slot. max_model_len: of this model. most: drafts of a row."""
        self._model, self._pool, self._build_input = model, pool, build_input
        self._token_table, self._tokens = token_table, token_table.numpy()
        self._blocks = block_table.numpy()
        self._own_table = torch.zeros(block_table.shape, dtype=block_table.dtype)
        self._size, self._max_model_len = block_size, max_model_len
        self._first_spare = num_blocks
        self._num_spare = num_spare_blocks(most, block_size)
        self._tags: list[int | None] = [None] * num_blocks
        self._slots: dict[int, _Slot] = {}
        self._sampler = Sampler(len(block_table), vocab_size, torch.device("cpu"), draw=model.draw)

    def apply(self, batch: ScheduledBatch) -> None:
        for assignment in batch.assignments:
            self._slots[assignment.slot] = _Slot(assignment, len(assignment.tables[0]))
        for number, index, _, group in batch.table_updates:
            if group == 0:
                slot = self._slots[number]
                slot.num_owned = index + 1
                if slot.num_valid is not None:  # these were in a spare block
                    slot.num_valid = min(slot.num_valid, index * self._size)

    def propose(self, rows: list[ProposingRow]) -> Proposals:
        left, runs = CATCH_UP_TOKENS, []
        for row in rows:
            last_id, slot = self._tokens[row.slot, row.length - 1], self._slots[row.slot]
            has_ended = last_id in slot.assignment.sampling.stop_token_ids
            if has_ended or row.length >= self._max_model_len:
                continue
            run = self._first_run(row, left)
            if (num_tokens := run.end - run.start) > _FEW:
                left -= num_tokens
            if num_tokens:
                runs.append(run)
        tables = self._sampler.draws_alone([run.row.slot for run in runs])
        if runs and tables is not None and self._model.drafts_alone:
            self._draft_at_once(runs, tables)
        else:
            drafting = runs
            while drafting:
                drafting = self._drawn(drafting, self._logits(drafting))
        for run in runs:
            run.slot.drafts = run.drafts
        drafts = {run.row.number: tuple(run.drafts) for run in runs if run.drafts}
        return Proposals(drafts, CATCH_UP_TOKENS - left)

    def _first_run(self, row: ProposingRow, most: int) -> _Run:
        """What is not computed of its tokens, of many no more than `most`: the last one is, for its
        logits are needed."""
        slot = self._slots[row.slot]
        start = min(self._num_valid(row, slot), row.length - 1)
        num_tokens = row.length - start
        if num_tokens > _FEW:
            num_tokens = min(num_tokens, most)
        if num_tokens:
            if slot.num_valid is None:
                self._sampler.assign(row.slot, slot.assignment.sampling, slot.assignment.seed)
            slot.num_valid, slot.length, slot.drafts = start, row.length, []
            self._write_table(row.slot, slot.num_owned)
        num = min(row.num, self._max_model_len - row.length)
        return _Run(row._replace(num=num), slot, start, start + num_tokens)

    def _num_valid(self, row: ProposingRow, slot: _Slot) -> int:
        if slot.num_valid is None:  # it may find its tokens in blocks that were computed before
            slot.digests = []
            num_full = min(row.length // self._size, slot.num_owned)
            for block in self._blocks[row.slot, :num_full].tolist():
                digest = self._digest(row.slot, slot.digests)
                if self._tags[block] != digest:
                    break
                slot.digests.append(digest)
            return len(slot.digests) * self._size
        ids = self._tokens[row.slot, slot.length : min(row.length, slot.num_valid)].tolist()
        for number, (token_id, draft) in enumerate(zip(ids, slot.drafts, strict=False)):
            if token_id != draft:
                return slot.length + number
        return slot.num_valid

    def _digest(self, number: int, before: list[int]) -> int:
        """Of the block after those with these digests."""
        first = len(before) * self._size
        ids = self._tokens[number, first : first + self._size]
        return hash((before[-1] if before else 0, ids.tobytes()))

    def _write_table(self, number: int, num_owned: int) -> None:
        own = self._own_table[number].numpy()
        own[:num_owned] = self._blocks[number, :num_owned]
        spare = own[num_owned : num_owned + self._num_spare]
        first = self._first_spare + number * self._num_spare
        spare[:] = range(first, first + len(spare))

    def _draft_at_once(self, runs: list[_Run], tables: DrawTables) -> None:
        """All rounds in one call."""
        runs = sorted(runs, key=lambda run: -run.row.num if run.samples else 0)
        nums = [run.row.num for run in runs if run.samples]
        for run in runs:
            self._untag(run, run.end + max(0, run.row.num - 1) * run.samples)
        batch, size = self._batch(runs), self._size
        own = self._model.draft(batch, self._token_table, self._own_table, size, nums, tables)
        for run, drafts in zip(runs, own, strict=False):  # those that sample
            run.drafts = drafts
            run.end += max(0, len(drafts) - 1)
        for run in runs:
            self._tag(run)

    def _logits(self, runs: list[_Run]) -> Tensor:
        """Computes the tokens of all runs. Returns those of the rows that sample."""
        for run in runs:
            self._untag(run, run.end)
        batch = self._batch(runs)
        step = self._build_input(batch, self._token_table, self._own_table, self._size)
        logits = self._model(step, self._pool)
        for run in runs:
            self._tag(run)
        return logits

    def _untag(self, run: _Run, end: int) -> None:
        """Before what follows its tagged blocks, up to `end`, is computed."""
        last = min(-(-end // self._size), run.slot.num_owned)
        for block in self._blocks[run.row.slot, len(run.slot.digests) : last].tolist():
            self._tags[block] = None

    def _tag(self, run: _Run) -> None:
        """After it is computed up to its end."""
        slot = run.slot
        slot.num_valid = run.end
        num_full = min(min(run.end, run.row.length) // self._size, slot.num_owned)
        for block in self._blocks[run.row.slot, len(slot.digests) : num_full].tolist():
            slot.digests.append(self._digest(run.row.slot, slot.digests))
            self._tags[block] = slot.digests[-1]

    def _batch(self, runs: list[_Run]) -> ScheduledBatch:
        return ScheduledBatch(
            step=0,
            assignments=(),
            table_updates=(),
            copies=(),
            slots=tuple([run.row.slot for run in runs]),
            starts=tuple([run.start for run in runs]),
            num_tokens=tuple([run.end - run.start for run in runs]),
            samples=tuple([run.samples for run in runs]),
            num_decodes=0,
        )

    def _drawn(self, runs: list[_Run], logits: Tensor) -> list[_Run]:
        """Draws a draft of each that samples; returns those that are to have another."""
        runs = [run for run in runs if run.samples]
        if not runs:
            return []
        slots, ends = [run.row.slot for run in runs], [run.end for run in runs]
        num_prompt = [run.slot.assignment.num_prompt_tokens for run in runs]
        ids = self._sampler.sample_ids(logits, slots, ends, self._token_table, num_prompt)
        for run, token_id in zip(runs, ids.tolist(), strict=True):
            if token_id == INVALID_ID:
                run.row = run.row._replace(num=0)
                continue
            self._tokens[run.row.slot, run.end] = token_id
            run.drafts.append(token_id)
            run.start, run.end = run.end, run.end + 1
        return [run for run in runs if len(run.drafts) < run.row.num]
