"""Turns a `ScheduledBatch` into the tensors that a step computes on, without side effects.

Nothing is padded: all tokens of a step are in one row of length T, sequence after sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.scheduler.types import ScheduledBatch, StateSnapshot


class AdapterRun(NamedTuple):
    """Consecutive tokens of a step that one LoRA adapter changes. weights: as the model that
    computes the step has made them of the adapter."""

    first_token: int
    num_tokens: int
    weights: Any


class InsertedRows(NamedTuple):
    """What an encoder has made, in place of embedded tokens: see `scheduler.types.Insert`.

    rows: (N, hidden_size), not multiplied as embeddings may be. at: (N,) int64, which of the step's
    tokens they are. deepstack: (K, N, hidden_size), what is added to the states of these tokens
    after each of the first K layers, or None.
    """

    rows: Tensor
    at: Tensor
    deepstack: Tensor | None = None

    def added(self, layer: int, states: Tensor) -> Tensor:
        """The states after a layer, (T, hidden_size), with what is added to them."""
        if self.deepstack is None or layer >= len(self.deepstack):
            return states
        return states.index_add(0, self.at, self.deepstack[layer].to(states.dtype))

    def to(self, device: torch.device) -> "InsertedRows":
        deepstack = None if self.deepstack is None else self.deepstack.to(device)
        return InsertedRows(self.rows.to(device), self.at.to(device), deepstack)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """One step's tokens, ragged by sequence. T tokens in B sequences, S of which sample.

    token_ids, positions: (T,) int64, each token's id and position in its sequence.
    kv_slots: (T,) int64, where in the pool its key and value are written.
    block_tables: (B, max_blocks) int32, each sequence's blocks in logical order.
    Both are (G, ...) where the model's layers are in several groups, each with a pool of its own;
    `group_steps` has those of one.
    query_starts: B + 1 offsets into the T tokens; context_lens: B lengths, this step's tokens
    included. The first num_decodes sequences have one token each. sample_rows: (S,) int64, which of
    the T tokens are sampled after. adapters: of the tokens that have one, in their order.
    num_drafts: of the first sequences, how many of their last tokens are drafts.
    snapshots: as of `ScheduledBatch`; in the group of recurrent states, the first entry of a
    sequence's block table is its state, and its kv_slots mean nothing.
    all_states: (T, hidden_size), where the states of all tokens are written, after the final norm,
    if given. merged: (T, hidden_size), the states that a head that drafts reads.

    The others are None in a step of a decoder's sequences without inserts. inserted: what stands in
    place of embedded tokens. angle_positions: (3, T) int64, of frame, row and column: what rotary
    positions with `RopeConfig.sections` rotate by, where it is not `positions`. reaches: (T,)
    int64, the position after the last that a token attends to, in layers with
    `Attention.has_spans`, where it is not its own. segments: (T,) int64, which of a prompt's texts
    a token is of, for an encoder; None for the first.
    """

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    block_tables: Tensor
    query_starts: list[int]
    context_lens: list[int]
    num_decodes: int
    sample_rows: Tensor
    adapters: tuple[AdapterRun, ...] = ()
    snapshots: tuple[StateSnapshot, ...] = ()
    num_drafts: tuple[int, ...] = ()
    all_states: Tensor | None = None
    merged: Tensor | None = None
    inserted: InsertedRows | None = None
    angle_positions: Tensor | None = None
    reaches: Tensor | None = None
    segments: Tensor | None = None

    def to(self, device: torch.device) -> "ModelInput":
        names = (
            *("token_ids", "positions", "kv_slots", "block_tables", "sample_rows"),
            *("inserted", "angle_positions", "reaches", "segments"),
        )
        given = {name: getattr(self, name) for name in names}
        return replace(
            self, **{name: each.to(device) for name, each in given.items() if each is not None}
        )

    def token_ids_or(self, pad_id: int) -> Tensor:
        """The ids of tokens that are embedded, and pad_id for others: (T,) int64."""
        if self.inserted is None:
            return self.token_ids
        return self.token_ids.index_fill(0, self.inserted.at, pad_id)

    @property
    def group_steps(self) -> "list[ModelInput]":
        """As the layers of each group see it."""
        if self.kv_slots.dim() == 1:
            return [self]
        pairs = zip(self.kv_slots, self.block_tables, strict=True)
        return [replace(self, kv_slots=slots, block_tables=tables) for slots, tables in pairs]


def build_model_input(
    batch: ScheduledBatch, token_table: Tensor, block_tables: Tensor, block_size: int
) -> ModelInput:
    """Reads the per-slot tables, to which the batch's updates have already been applied.
    block_tables: (slots, max_blocks), or (G, slots, max_blocks) for several groups of layers."""
    device = token_table.device
    query_starts = [0, *accumulate(batch.num_tokens)]
    # One transfer: three rows of length B.
    slots, starts, counts = torch.tensor(
        (batch.slots, batch.starts, batch.num_tokens), dtype=torch.int64
    ).to(device, non_blocking=True)
    if query_starts[-1] == len(batch.slots):
        token_slots, positions = slots, starts
    else:
        num_tokens = query_starts[-1]
        token_slots = slots.repeat_interleave(counts, output_size=num_tokens)
        first = (counts.cumsum(0) - counts - starts).repeat_interleave(
            counts, output_size=num_tokens
        )
        positions = torch.arange(num_tokens, device=device) - first
    blocks = block_tables[..., token_slots, positions // block_size]
    return ModelInput(
        token_ids=token_table[token_slots, positions],
        positions=positions,
        kv_slots=blocks * block_size + positions % block_size,
        block_tables=block_tables[..., slots, :],
        query_starts=query_starts,
        context_lens=[s + n for s, n in zip(batch.starts, batch.num_tokens, strict=True)],
        num_decodes=num_single(batch),
        sample_rows=torch.tensor(sample_rows(batch), dtype=torch.int64, device=device),
        snapshots=batch.snapshots,
        num_drafts=tuple(map(len, batch.drafts)),
    )


def as_encoder_input(step: ModelInput) -> ModelInput:
    """Each row is a whole text, whose tokens attend to all of it."""
    counts = torch.tensor(step.query_starts).diff()
    reaches = torch.tensor(step.context_lens).repeat_interleave(counts)
    return replace(step, reaches=reaches.to(step.positions.device))


def with_segments(step: ModelInput, nums: Sequence[int]) -> ModelInput:
    """nums: of each row, the tokens of its first text; 0: all."""
    counts = torch.tensor(step.query_starts).diff()
    first = torch.tensor([num or end for num, end in zip(nums, step.context_lens, strict=True)])
    ends = first.repeat_interleave(counts).to(step.positions.device)
    return replace(step, segments=(step.positions >= ends).long())


def num_single(batch: ScheduledBatch) -> int:
    """How many of the first rows are decodes of one token each."""
    drafts = batch.drafts
    return next((row for row, each in enumerate(drafts) if each), batch.num_decodes)


def sample_rows(batch: ScheduledBatch) -> list[int]:
    """Which of a step's tokens are sampled after: the last of each row that samples, and all of a
    row with drafts."""
    rows: list[int] = []
    ends = accumulate(batch.num_tokens)
    if not batch.drafts:
        return [end - 1 for end, samples in zip(ends, batch.samples, strict=True) if samples]
    for row, (end, samples) in enumerate(zip(ends, batch.samples, strict=True)):
        num = batch.num_tokens[row] if row < batch.num_decodes else 1
        if samples:
            rows += range(end - num, end)
    return rows
