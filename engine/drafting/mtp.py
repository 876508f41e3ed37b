"""`MtpProposer`: drafts by the head that checkpoints of Qwen3.5 have for it (`MtpHead`).

The head reads what the served model makes of each token. A step copies these states, and nothing
else is done for the head before drafts are wanted: prompts without drafts cost nothing. They are
kept of the newest tokens of a few sequences, so a draft may be made of less than the whole
sequence, and is then less likely to be right.

The head's keys and values are in blocks of a pool of its own, with the numbers that the served
model's have. Where the head has computed all of a block, a mark says so, and a prefix that is found
has its keys too; those of its last position are of the token that followed there.

A draft is drawn as the token will be: see `penstock.engine.drafting.draft_model`. After the first
one the head goes on from its own states, as that of vLLM does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from penstock.engine.drafting.proposer import Proposals, Proposer, ProposingRow
from penstock.engine.memory.pool.kv_pool import LayerPools
from penstock.engine.native.model import NativeModel
from penstock.engine.sampling.sampler import INVALID_ID, Sampler
from penstock.engine.step.model_input import ModelInput
from penstock.scheduler.types import ScheduledBatch, SlotAssignment

# States are kept of so many of a sequence's newest tokens, and of so many sequences: in a step of
# more than these, drafts are hardly worth their time.
MOST_KEPT, MOST_ROWS = 1024, 8
# Tokens of a sequence that are computed after one step, so that the next one is not long in coming.
_CATCH_UP_TOKENS = 256
_NO_RUN = -1


def num_spare_blocks(most: int, block_size: int) -> int:
    """For the keys of drafts after the blocks of sequences. most: drafts of a row."""
    return MOST_ROWS * -(-most // block_size)


@dataclass(slots=True)
class _Slot:
    """num_blocks: that the sequence has. first, end: the positions whose states are kept; num_new:
    how many of these are of the last step. run: the block from which on the head has keys, up to
    the position `computed`, and from which its positions count."""

    assignment: SlotAssignment
    num_blocks: int
    first: int = 0
    end: int = 0
    num_new: int = 0
    run: int = _NO_RUN
    computed: int = 0
    is_new: bool = True
    has_drafted: bool = False


@dataclass(slots=True)
class _Run:
    """The head computes the positions of a row from `first` to before `end`. base: the position
    that they count from. table: its blocks from there on, and spare ones. samples: whether these
    are all that there are."""

    row: ProposingRow
    num_prompt_tokens: int
    base: int
    first: int
    end: int
    table: Tensor
    samples: bool
    drafts: list[int] = field(default_factory=list)


class MtpProposer(Proposer):
    """See `Proposer`."""

    name = "mtp"

    def __init__(
        self,
        token_table: Tensor,
        block_table: Tensor,
        *,
        head: NativeModel,
        pool: LayerPools,
        num_blocks: int,
        block_size: int,
        most: int,
        hidden_size: int,
        vocab_size: int,
        dtype: torch.dtype,
    ) -> None:
        """pool: of the head; its first num_blocks are those of the served model's pool, and those
        that are spare follow. most: drafts of a row."""
        self._head, self._pool, self._size = head, pool, block_size
        self._tokens, self._table = token_table, block_table
        self._slots: dict[int, _Slot] = {}
        # By block: the run in which the head has computed all of it.
        self._runs = torch.full((num_blocks,), _NO_RUN)
        spare = torch.arange(num_blocks, num_blocks + num_spare_blocks(most, block_size))
        self._spare = spare.int().view(MOST_ROWS, -1)
        # By slot: the state of position p is in row p modulo their number. Used last is last.
        self._kept: dict[int, Tensor] = {}
        self._room = torch.empty(0, hidden_size, dtype=dtype)
        self._has_states = False
        num_slots = len(block_table)
        self._sampler = Sampler(num_slots, vocab_size, torch.device("cpu"), draw=head.draw)

    def apply(self, batch: ScheduledBatch) -> None:
        for assignment in batch.assignments:
            self._slots[assignment.slot] = _Slot(assignment, len(assignment.tables[0]))
        for update in batch.table_updates:
            if update.group == 0:
                self._slots[update.slot].num_blocks = update.index + 1
                self._runs[update.block_id] = _NO_RUN
        for slot, start in zip(batch.slots, batch.starts, strict=True):
            if self._slots[slot].is_new:
                self._begin(slot, start)

    def room(self, batch: ScheduledBatch) -> Tensor | None:
        """See `Proposer`."""
        self._has_states = len(batch.slots) <= MOST_ROWS
        if not self._has_states:
            return None
        num_tokens, (num, hidden_size) = sum(batch.num_tokens), self._room.shape
        if num < num_tokens:
            self._room = torch.empty(2 * num_tokens, hidden_size, dtype=self._room.dtype)
        return self._room[:num_tokens]

    def keep(self, batch: ScheduledBatch, num_rejected: Mapping[int, int]) -> None:
        """See `Proposer`."""
        if not self._has_states:
            return
        first = 0
        for row, num in enumerate(batch.num_tokens):
            states = self._room[first : first + num - num_rejected.get(row, 0)]
            self._keep(batch.slots[row], batch.starts[row], states)
            first += num

    def propose(self, rows: list[ProposingRow]) -> Proposals:
        wanted = [row for row in rows if row.num > 0 and self._may(row)][:MOST_ROWS]
        if not wanted:
            return Proposals({})
        going, ids, states, num_caught_up = [], [], [], 0
        for row, spare in zip(wanted, self._spare, strict=False):
            slot = self._slots[row.slot]
            first, end = slot.computed, min(slot.end, slot.computed + _CATCH_UP_TOKENS)
            ids.append(self._tokens[row.slot, first + 1 : end + 1])
            states.append(self._kept[row.slot][torch.arange(first, end) % MOST_KEPT])
            num_caught_up += max(0, min(end, slot.end - slot.num_new) - first)
            going.append(self._run(row, slot, end, spare))
            full = self._table[row.slot, first // self._size : end // self._size]
            self._runs[full.long()] = slot.run
            slot.computed = end
        runs, next_ids, next_states = going, torch.cat(ids), torch.cat(states)
        while going:
            logits, next_states = self._computed(going, next_ids, next_states)
            going = [run for run in going if run.samples]
            still = self._drawn(going, logits) if going else []
            going, next_states = [going[at] for at in still], next_states[still]
            next_ids = torch.tensor([run.drafts[-1] for run in going])
        drafts = {run.row.number: tuple(run.drafts) for run in runs if run.drafts}
        return Proposals(drafts, num_caught_up)

    def _run(self, row: ProposingRow, slot: _Slot, end: int, spare: Tensor) -> _Run:
        if not slot.has_drafted:
            slot.has_drafted = True
            self._sampler.assign(row.slot, slot.assignment.sampling, slot.assignment.seed)
        # As wide as those of others.
        table = self._table.new_zeros(self._table.shape[1] + len(spare))
        owned = self._table[row.slot, slot.run : slot.num_blocks]
        table[: len(owned)] = owned
        table[len(owned) : len(owned) + len(spare)] = spare
        num_prompt_tokens = slot.assignment.num_prompt_tokens
        base = slot.run * self._size
        samples = end == slot.end
        return _Run(row, num_prompt_tokens, base, slot.computed, end, table, samples)

    def _computed(self, runs: list[_Run], ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits after each row that samples, and the head's state there. ids, states:
        of all tokens of the rows, as the head reads them."""
        size = self._size
        positions = [torch.arange(run.first - run.base, run.end - run.base) for run in runs]
        each = zip(runs, positions, strict=True)
        places = [run.table[at // size].long() * size + at % size for run, at in each]
        starts = [0, *accumulate(map(len, positions))]
        ends = zip(runs, starts[1:], strict=True)
        last = torch.tensor([end - 1 for run, end in ends if run.samples], dtype=torch.int64)
        found = torch.empty_like(states)
        step = ModelInput(
            token_ids=ids,
            positions=torch.cat(positions),
            kv_slots=torch.cat(places),
            block_tables=torch.stack([run.table for run in runs]),
            query_starts=starts,
            context_lens=[run.end - run.base for run in runs],
            num_decodes=0,
            sample_rows=last,
            merged=states,
            all_states=found,
        )
        return self._head(step, self._pool), found[last]

    def _drawn(self, runs: list[_Run], logits: Tensor) -> list[int]:
        """Draws a draft of each. Returns which are to have another."""
        lengths = [run.row.length + len(run.drafts) for run in runs]
        ids = self._sampler.sample_ids(
            logits,
            [run.row.slot for run in runs],
            lengths,
            self._tokens,
            [run.num_prompt_tokens for run in runs],
        ).tolist()
        still = []
        for at, (run, length, token_id) in enumerate(zip(runs, lengths, ids, strict=True)):
            if token_id == INVALID_ID:
                continue
            self._tokens[run.row.slot, length] = token_id
            run.drafts.append(token_id)
            run.first, run.end = run.end, run.end + 1
            if len(run.drafts) < run.row.num:
                still.append(at)
        return still

    def _begin(self, number: int, start: int) -> None:
        """The sequence's first step in its slot: what comes before was found."""
        slot, num = self._slots[number], start // self._size
        slot.is_new, slot.first, slot.end = False, start, start
        blocks = self._table[number, : slot.num_blocks].long()
        self._runs[blocks[num:]] = _NO_RUN
        if num and start % self._size == 0:
            runs = self._runs[blocks[:num]]
            run = int(runs[-1])
            if run != _NO_RUN and bool((runs[run:] == run).all()):
                slot.run, slot.computed = run, start

    def _keep(self, number: int, start: int, states: Tensor) -> None:
        kept = self._kept.pop(number, None)
        if kept is None:
            if len(self._kept) < MOST_ROWS:
                kept = self._room.new_empty(MOST_KEPT, self._room.shape[1])
            else:
                oldest = next(iter(self._kept))
                kept = self._kept.pop(oldest)
                self._slots[oldest].end = 0
        self._kept[number] = kept
        slot, end = self._slots[number], start + len(states)
        if slot.end != start:
            slot.first = start
        slot.first, slot.end, slot.num_new = max(slot.first, end - MOST_KEPT), end, len(states)
        newest = torch.arange(max(start, slot.first), end)
        kept[newest % MOST_KEPT] = states[len(states) - len(newest) :]

    def _may(self, row: ProposingRow) -> bool:
        """Whether the head can go on to the last known token, or begin with what is kept."""
        slot = self._slots[row.slot]
        if row.slot not in self._kept or slot.end != row.length - 1:
            return False
        if slot.run == _NO_RUN or slot.computed < slot.first:
            slot.run = -(-slot.first // self._size)
            slot.computed = slot.run * self._size
        return slot.computed < slot.end
