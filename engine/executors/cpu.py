"""`CpuExecutor`: a transformer over a paged KV pool, whose steps the host makes, and samples.

It holds what a step needs of every sequence, its token ids and its block table, in one row per
slot; a batch brings only differences. Sampled ids are written to the token table, where the next
step reads them.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from penstock.engine.drafting.proposer import MakeProposer, Proposer, ProposingRow
from penstock.engine.encoders.inputs import with_inserts
from penstock.engine.encoders.inserts import InsertTable
from penstock.engine.executors.awaited_ids import AwaitedIds, StepIds
from penstock.engine.executors.loaded_model import LoadedModel
from penstock.engine.memory.tiers.disk_tier import DiskTier
from penstock.engine.memory.tiers.pool_bytes import StepsInFlight
from penstock.engine.models.decoder.model import Model
from penstock.engine.native.model import NativeModel
from penstock.engine.ranks.membership import Membership
from penstock.engine.sampling.prompt_reader import PromptPart, PromptReader
from penstock.engine.sampling.sampler import Draw, Sampler, failed_rows
from penstock.engine.sampling.verify import DraftedRow, sample_drafted
from penstock.engine.step.executor import block_copies
from penstock.engine.step.model_input import ModelInput, build_model_input, with_segments
from penstock.scheduler.types import (
    Insert,
    PromptOutput,
    Request,
    RequestId,
    SampledTokens,
    ScheduledBatch,
)

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


@dataclass(slots=True, kw_only=True)
class HostModel(LoadedModel):
    """A model whose steps the host makes. native: the same as model where a step is compiled.
    build_input: as `build_model_input`. draw: see `Sampler`. place: this rank's, among those that
    compute it. make_proposer: None where nothing proposes drafts."""

    model: Model
    tier: DiskTier | None = None
    steps_in_flight: StepsInFlight = field(default_factory=StepsInFlight)
    native: NativeModel | None = None
    build_input: Callable[[ScheduledBatch, Tensor, Tensor, int], ModelInput] = build_model_input
    draw: Draw | None = None
    place: Membership = field(default_factory=Membership)
    make_proposer: MakeProposer | None = None


class CpuExecutor:
    """See `penstock.engine.step.executor.Executor`."""

    def __init__(self, loaded: HostModel) -> None:
        info, max_num_seqs = loaded.info, loaded.max_num_seqs
        self.info, self.tier, self.adapters = info, loaded.tier, loaded.adapters
        self._pipeline = loaded.place.pipeline
        self._has_stages = info.pipeline_parallel_size > 1
        self._has_output_layer = self._pipeline.is_last
        self._is_follower = loaded.place.rank > 0
        self._steps_in_flight = loaded.steps_in_flight
        self._launched: deque[_LaunchedStep] = deque()
        self._model, self._native, self.pool = loaded.model, loaded.native, loaded.pool
        self.journals = self.pool.journals
        self._build_input, self._grammars = loaded.build_input, loaded.grammars
        max_blocks = -(-info.max_model_len // self.pool.block_size)
        self._token_table = torch.zeros(max_num_seqs, info.max_model_len + 1, dtype=torch.int64)
        # The same memory: a number takes numpy a tenth of torch's time.
        self._tokens = self._token_table.numpy()
        num_groups = len(self.pool.all_groups)
        tables = torch.zeros(num_groups, max_num_seqs, max_blocks, dtype=torch.int32)
        self._group_tables = tables.unbind()
        self._block_tables = tables if num_groups > 1 else tables[0]
        self._prompt_lengths = [0] * max_num_seqs
        self._awaited = AwaitedIds()  # where this rank is not rank 0
        self._sampler = Sampler(max_num_seqs, info.vocab_size, _CPU, self._grammars, loaded.draw)
        self._inserts = InsertTable(loaded.encoder)
        self._inserts_of: dict[int, tuple[Insert, ...]] = {}  # by slot, where there are any
        self._num_first = [0] * max_num_seqs  # see `Request`, by slot
        self._prompts = PromptReader(info.vocab_size, self._model.logits, loaded.pooled)
        self._proposer: Proposer | None = None
        if loaded.make_proposer is not None:
            self._proposer = loaded.make_proposer(self._token_table, self._group_tables[0])

    def prepare(self, request: Request) -> "Future[Any] | None":
        self._inserts.prepare(request)
        self.adapters.prepare(request)
        return self._grammars.prepare(request)

    def release(self, request_id: RequestId) -> None:
        if self._launched:  # steps that are yet to be computed may have a row of it
            self._launched[-1].released.append(request_id)
            return
        self._grammars.release(request_id)
        self.adapters.release(request_id)
        self._inserts.release(request_id)

    def execute(self, batch: ScheduledBatch) -> "_LaunchedStep":
        self._steps_in_flight.launch()
        launched = _LaunchedStep(self, batch)
        self._launched.append(launched)
        if not self._has_stages:  # else those before this one compute, until it is waited for
            launched.wait()
        return launched

    def compute_next(self, launched: "_LaunchedStep") -> SampledTokens:
        """Computes the oldest step that was launched. Raises RankFailed."""
        assert launched is self._launched[0], "steps are waited for in the order of their launch"
        batch = launched.batch
        with torch.inference_mode(), self._pipeline.in_step(batch.step):
            self._apply(batch)
            sampled = self._computed(batch)
            if batch.encodes:
                encoded, encoding_s = self._inserts.encode(batch)
                sampled = sampled._replace(encoded=encoded, encoding_s=encoding_s)
        if self._has_stages:
            computed_s = self._pipeline.computed_s / self._pipeline.num_stages
            sampled = sampled._replace(computed_s=computed_s)
        self._launched.popleft()
        self._steps_in_flight.complete()
        for request_id in launched.released:
            self.release(request_id)
        return sampled

    def follow(self, batch: ScheduledBatch, sampled: Sequence[StepIds]) -> None:
        """This rank's part of a step, where it is not rank 0, which samples. sampled: of the steps
        that rank 0 has completed since the last call, in their order."""
        with torch.inference_mode(), self._pipeline.in_step(batch.step):
            if self._native is not None and sampled:
                self._native.accept(sampled[-1].num_accepted)
            for slot, position, token_id in self._awaited.told(sampled):
                self._tokens[slot, position] = token_id
            self._awaited.assigned(batch)
            self._apply(batch)
            if batch.slots:
                self._compute(batch)
            self._awaited.launched(batch)

    def _apply(self, batch: ScheduledBatch) -> None:
        """Updates the tables, in the order that `ScheduledBatch` states."""
        self._inserts.drop(batch)
        for assignment in batch.assignments:
            slot, token_ids, num_prompt_tokens, _, sampling, seed, *_ = assignment
            self._token_table[slot, : len(token_ids)] = self._tensor(token_ids)
            for group, block_ids in enumerate(assignment.tables):
                self.pool.all_groups[group].reach(block_ids)
                self._group_tables[group][slot, : len(block_ids)] = self._tensor(block_ids)
            self._prompt_lengths[slot] = num_prompt_tokens
            if self._has_output_layer:
                self._prompts.assign(assignment)
            self.adapters.assign(assignment)
            self._inserts_of.pop(slot, None)
            self._num_first[slot] = assignment.num_first
            if assignment.inserts:
                self._inserts_of[slot] = assignment.inserts
            if self._is_follower:
                continue
            self._sampler.assign(slot, sampling, seed)
            self._grammars.assign(assignment)
        for slot, start, drafts in zip(batch.slots, batch.starts, batch.drafts, strict=False):
            for position, draft in enumerate(drafts, start + 1):
                self._tokens[slot, position] = draft
        for group, pool in enumerate(self.pool.all_groups):
            updates = [update for update in batch.table_updates if update.group == group]
            if updates:
                pool.reach(update.block_id for update in updates)
                slots, indices, blocks, _ = self._tensor(updates).unbind(1)
                self._group_tables[group][slots, indices] = blocks.to(torch.int32)
            if copies := block_copies(batch.copies, group):
                pool.copy(copies)
        if batch.snapshots:
            self.pool.all_groups[-1].reach(state for _, _, state in batch.snapshots)
        if self._proposer is not None:
            self._proposer.apply(batch)

    def _computed(self, batch: ScheduledBatch) -> SampledTokens:
        if not batch.slots:
            return SampledTokens(step=batch.step, token_ids=[])
        step, logits, slots, prompts = self._compute(batch)
        done = SampledTokens(
            step=batch.step,
            token_ids=[],
            prompts=prompts,
            num_experts=None if self._native is None else self._native.num_experts_read,
            adapter_bytes=self.adapters.num_bytes(batch),
        )
        if not slots:
            self._keep_states(batch, done)
            return done
        lengths = [
            length
            for length, samples in zip(step.context_lens, batch.samples, strict=True)
            if samples
        ]
        if batch.drafts:
            done = self._sampled_drafted(batch, done, logits)
        else:
            done = self._sampled(done, logits, slots, lengths)
        if batch.wants_forced:
            done = done._replace(forced=self._grammars.forced(slots))
        self._keep_states(batch, done)
        if self._proposer is not None and any(batch.wanted_drafts):
            done = self._with_proposals(self._proposer, batch, done, slots, lengths)
        return done

    def _sampled(
        self, done: SampledTokens, logits: Tensor, slots: list[int], lengths: list[int]
    ) -> SampledTokens:
        """done: but for what is sampled."""
        prompt_lengths = [self._prompt_lengths[slot] for slot in slots]
        ids, logprobs = self._sampler.sample(
            logits, slots, lengths, self._token_table, prompt_lengths
        )
        token_ids = ids.tolist()
        for slot, length, token_id in zip(slots, lengths, token_ids, strict=True):
            self._tokens[slot, length] = token_id
        constraints = self._grammars.constraints(slots)
        violated = self._grammars.advance(slots, token_ids, constraints)
        failed = failed_rows(token_ids, violated)
        return done._replace(token_ids=token_ids, logprobs=logprobs, failed=failed)

    def _sampled_drafted(
        self, batch: ScheduledBatch, done: SampledTokens, logits: Tensor
    ) -> SampledTokens:
        """done: but for what is sampled."""
        rows, num_decodes = [], batch.num_decodes
        each = zip(batch.slots, batch.starts, batch.num_tokens, batch.samples, strict=True)
        for i, (slot, start, num_tokens, samples) in enumerate(each):
            if samples:
                drafts = batch.drafts[i] if i < num_decodes else ()
                length = start + num_tokens - len(drafts)
                rows.append(DraftedRow(slot, length, self._prompt_lengths[slot], drafts))
        found = sample_drafted(self._sampler, self._grammars, logits, self._token_table, rows)
        for i, row in enumerate(rows):
            more = found.further[i].token_ids if i in found.further else ()
            for position, token_id in enumerate((found.token_ids[i], *more), row.length):
                self._tokens[row.slot, position] = token_id
        if self._native is not None:  # those that have drafts are the first of all
            further = found.further
            self._native.accept(
                [len(further[i].token_ids) if i in further else 0 for i in range(num_decodes)]
            )
        return done._replace(**found._asdict())

    def _keep_states(self, batch: ScheduledBatch, sampled: SampledTokens) -> None:
        if self._proposer is None:
            return
        num_rejected = {row: len(drafts) for row, drafts in enumerate(batch.drafts) if drafts}
        for row, further in sampled.further.items():
            num_rejected[row] -= len(further.token_ids)
        self._proposer.keep(batch, num_rejected)

    def _with_proposals(
        self,
        proposer: Proposer,
        batch: ScheduledBatch,
        sampled: SampledTokens,
        slots: list[int],
        ends: list[int],
    ) -> SampledTokens:
        """ends: of the rows that sample, the positions after their tokens and drafts."""
        rows = []
        all_drafts = chain(batch.drafts, repeat(()))  # decodes come first
        each = zip(slots, ends, batch.wanted_drafts, all_drafts, strict=False)
        for number, (slot, end, num, drafts) in enumerate(each):
            if num and number not in sampled.failed:
                further = sampled.further.get(number)
                num_known = 1 if further is None else 1 + len(further.token_ids)
                rows.append(ProposingRow(number, slot, end - len(drafts) + num_known, num))
        began_s = perf_counter()
        proposed, num_caught_up = proposer.propose(rows)
        return sampled._replace(
            proposed=proposed, proposing_s=perf_counter() - began_s, num_caught_up=num_caught_up
        )

    def _compute(
        self, batch: ScheduledBatch
    ) -> tuple[ModelInput, Tensor, list[int], tuple[PromptOutput | None, ...]]:
        """Returns the input of the model, the logits of the rows that sample, their slots, and the
        outputs of prompts."""
        block_size = self.info.block_size
        step = self._build_input(batch, self._token_table, self._block_tables, block_size)
        if self._inserts_of:
            step = with_inserts(step, batch, self._inserts_of, self._inserts.rows_of)
        if any(self._num_first[slot] for slot in batch.slots):
            step = with_segments(step, [self._num_first[slot] for slot in batch.slots])
        if adapters := self.adapters.runs(batch, step.query_starts):
            step = replace(step, adapters=adapters)
        if self._proposer is not None and (room := self._proposer.room(batch)) is not None:
            step = replace(step, all_states=room)
        slots = [slot for slot, samples in zip(batch.slots, batch.samples, strict=True) if samples]
        if not self._is_follower:
            self._grammars.start(slots)
        if parts := self._prompts.parts(batch, step.query_starts):
            logits, prompts = self._compute_and_read(step, parts)
            return step, logits, slots, prompts
        return step, self._model(step, self.pool), slots, ()

    def _compute_and_read(
        self, step: ModelInput, parts: list[PromptPart]
    ) -> tuple[Tensor, tuple[PromptOutput | None, ...]]:
        """The logits of a step that also has outputs of prompts, and those outputs."""
        num_sampling = len(step.sample_rows)
        prompt_rows = self._tensor([row for part in parts for row in part.rows])
        rows = torch.cat((step.sample_rows, prompt_rows))
        states = self._model.states(step, self.pool, rows)
        prompts = self._prompts.read(parts, states[num_sampling:], self._token_table)
        return self._model.logits(states[:num_sampling]), prompts

    def _tensor(self, values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)


class _LaunchedStep:
    """`PendingTokens` of a step. released: requests that have ended since it was launched."""

    def __init__(self, executor: CpuExecutor, batch: ScheduledBatch) -> None:
        self._executor = executor
        self._sampled: SampledTokens | None = None
        self.batch = batch
        self.released: list[RequestId] = []

    def wait(self) -> SampledTokens:
        if self._sampled is None:
            self._sampled = self._executor.compute_next(self)
        return self._sampled
