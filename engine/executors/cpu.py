"""`CpuExecutor`: a transformer over a paged KV pool, whose steps the host makes, and samples.

It holds what a step needs of every sequence, its token ids and its block table, in one row per
slot; a batch brings only differences. Sampled ids are written to the token table, where the next
step reads them.
"""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.engine.executors.awaited_ids import AwaitedIds
from penstock.engine.executors.loaded_model import LoadedModel
from penstock.engine.memory.tiers.disk_tier import DiskTier
from penstock.engine.models.lora.store import Adapters
from penstock.engine.ranks.group import Group
from penstock.engine.sampling.prompt_reader import PromptPart, PromptReader
from penstock.engine.sampling.sampler import Sampler, failed_rows
from penstock.engine.step.executor import block_copies
from penstock.engine.step.model_info import ModelInfo
from penstock.engine.step.model_input import ModelInput
from penstock.scheduler.cache.journal import BlockJournal
from penstock.scheduler.types import PromptOutput, Request, RequestId, SampledTokens, ScheduledBatch

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


class CpuExecutor:
    """See `penstock.engine.step.executor.Executor`."""

    def __init__(self, loaded: LoadedModel) -> None:
        info, max_num_seqs = loaded.info, loaded.max_num_seqs
        self._everyone, self._pipeline = loaded.everyone, loaded.pipeline
        self.steps_in_flight = loaded.steps_in_flight
        self._model, self._native, self._pool = loaded.model, loaded.native, loaded.pool
        self._tier, self._adapters, self._info = loaded.tier, loaded.adapters, info
        self._build_input, self._grammars = loaded.build_input, loaded.grammars
        max_blocks = -(-info.max_model_len // self._pool.block_size)
        self._token_table = torch.zeros(max_num_seqs, info.max_model_len + 1, dtype=torch.int64)
        # The same memory: a number takes numpy a tenth of torch's time.
        self._tokens = self._token_table.numpy()
        num_groups = len(self._pool.all_groups)
        tables = torch.zeros(num_groups, max_num_seqs, max_blocks, dtype=torch.int32)
        self._group_tables = tables.unbind()
        self._block_tables = tables if num_groups > 1 else tables[0]
        self._prompt_lengths = [0] * max_num_seqs
        self._awaited = AwaitedIds()  # where this rank is not rank 0
        self._sampler = Sampler(max_num_seqs, info.vocab_size, _CPU, self._grammars, loaded.argmax)
        self._prompts = PromptReader(info.vocab_size, self._model.logits)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def runs_ahead(self) -> bool:
        return self._info.runs_ahead

    @property
    def journals(self) -> tuple[BlockJournal, ...]:
        return self._pool.journals

    @property
    def tier(self) -> DiskTier | None:
        return self._tier

    @property
    def adapters(self) -> Adapters:
        return self._adapters

    def prepare(self, request: Request) -> "Future[Any] | None":
        self._adapters.prepare(request)
        return self._grammars.prepare(request)

    def release(self, request_id: RequestId) -> None:
        self._grammars.release(request_id)
        self._adapters.release(request_id)

    def execute(self, batch: ScheduledBatch) -> "Done":
        with torch.inference_mode(), self._in_step(batch):
            self._apply(batch)
            sampled = self._run(batch)
        if self._pipeline is not None:
            computed_s = self._pipeline.computed_s / self._pipeline.num_stages
            sampled = sampled._replace(computed_s=computed_s)
        return Done(sampled)

    def follow(self, batch: ScheduledBatch, sampled: Sequence[Sequence[int]]) -> None:
        """This rank's part of a step, where it is not rank 0, which samples. sampled: of the steps
        that rank 0 has completed since the last call, in their order."""
        with torch.inference_mode(), self._in_step(batch):
            for slot, position, token_id in self._awaited.told(sampled):
                self._tokens[slot, position] = token_id
            self._awaited.assigned(batch)
            self._apply(batch)
            if batch.slots:
                self._compute(batch)
            self._awaited.launched(batch)

    @property
    def _is_follower(self) -> bool:
        return self._everyone is not None and self._everyone.rank > 0

    @property
    def _has_output_layer(self) -> bool:
        return self._pipeline is None or self._pipeline.after is None

    def _in_step(self, batch: ScheduledBatch) -> AbstractContextManager[None]:
        everyone = self._everyone
        return nullcontext() if everyone is None else self._in_step_of(everyone, batch.step)

    @contextmanager
    def _in_step_of(self, everyone: Group, step: int) -> Iterator[None]:
        of_stage = nullcontext() if self._pipeline is None else self._pipeline.in_step(step)
        with everyone.doing.in_step(step), of_stage:
            yield

    def _apply(self, batch: ScheduledBatch) -> None:
        """Updates the tables, in the order that `ScheduledBatch` states."""
        for assignment in batch.assignments:
            slot, token_ids, num_prompt_tokens, _, sampling, seed, *_ = assignment
            self._token_table[slot, : len(token_ids)] = self._tensor(token_ids)
            for group, block_ids in enumerate(assignment.tables):
                self._pool.all_groups[group].reach(block_ids)
                self._group_tables[group][slot, : len(block_ids)] = self._tensor(block_ids)
            self._prompt_lengths[slot] = num_prompt_tokens
            if self._has_output_layer:
                self._prompts.assign(assignment)
            self._adapters.assign(assignment)
            if self._is_follower:
                continue
            self._sampler.assign(slot, sampling, seed)
            self._grammars.assign(assignment)
        for group, pool in enumerate(self._pool.all_groups):
            updates = [update for update in batch.table_updates if update.group == group]
            if updates:
                pool.reach(update.block_id for update in updates)
                slots, indices, blocks, _ = self._tensor(updates).unbind(1)
                self._group_tables[group][slots, indices] = blocks.to(torch.int32)
            if copies := block_copies(batch.copies, group):
                pool.copy(copies)

    def _run(self, batch: ScheduledBatch) -> SampledTokens:
        if not batch.slots:
            return SampledTokens(step=batch.step, token_ids=[])
        step, logits, slots, prompts = self._compute(batch)
        num_experts = None if self._native is None else self._native.num_experts_read
        adapter_bytes = self._adapters.num_bytes(batch)
        lengths = [
            length
            for length, samples in zip(step.context_lens, batch.samples, strict=True)
            if samples
        ]
        if not slots:
            return SampledTokens(
                step=batch.step,
                token_ids=[],
                prompts=prompts,
                num_experts=num_experts,
                adapter_bytes=adapter_bytes,
            )
        prompt_lengths = [self._prompt_lengths[slot] for slot in slots]
        ids, logprobs = self._sampler.sample(
            logits, slots, lengths, self._token_table, prompt_lengths
        )
        token_ids = ids.tolist()
        for slot, length, token_id in zip(slots, lengths, token_ids, strict=True):
            self._tokens[slot, length] = token_id
        constraints = self._grammars.constraints(slots)
        of_grammars = self._grammars.advance(slots, token_ids, constraints)
        return SampledTokens(
            step=batch.step,
            token_ids=token_ids,
            logprobs=logprobs,
            failed=failed_rows(token_ids, of_grammars),
            prompts=prompts,
            num_experts=num_experts,
            adapter_bytes=adapter_bytes,
        )

    def _compute(
        self, batch: ScheduledBatch
    ) -> tuple[ModelInput, Tensor, list[int], tuple[PromptOutput | None, ...]]:
        """What the model read; the logits of the rows that sample, their slots, and the outputs of
        prompts."""
        block_size = self._info.block_size
        step = self._build_input(batch, self._token_table, self._block_tables, block_size)
        if adapters := self._adapters.runs(batch, step.query_starts):
            step = replace(step, adapters=adapters)
        slots = [slot for slot, samples in zip(batch.slots, batch.samples, strict=True) if samples]
        if not self._is_follower:
            self._grammars.start(slots)
        if parts := self._prompts.parts(batch, step.query_starts):
            logits, prompts = self._compute_and_read(step, parts)
            return step, logits, slots, prompts
        return step, self._model(step, self._pool), slots, ()

    def _compute_and_read(
        self, step: ModelInput, parts: list[PromptPart]
    ) -> tuple[Tensor, tuple[PromptOutput | None, ...]]:
        """The logits of a step that also has outputs of prompts, and those outputs."""
        num_sampling = len(step.sample_rows)
        prompt_rows = self._tensor([row for part in parts for row in part.rows])
        rows = torch.cat((step.sample_rows, prompt_rows))
        states = self._model.states(step, self._pool, rows)
        prompts = self._prompts.read(parts, states[num_sampling:], self._token_table)
        return self._model.logits(states[:num_sampling]), prompts

    def _tensor(self, values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)


class Done:
    """`PendingTokens` of a step that is complete when `execute` returns."""

    def __init__(self, sampled: SampledTokens) -> None:
        self._sampled = sampled

    def wait(self) -> SampledTokens:
        return self._sampled
