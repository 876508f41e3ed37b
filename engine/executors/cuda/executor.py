"""`CudaExecutor`: a transformer on one GPU; the host schedules and launches one step ahead.

A step of decodes alone is a CUDA graph, from the gather of its tokens to the sampled ids: it reads
and writes per-slot tables (`DeviceTables`, `StepSampler`), so between two steps of the same
sequences nothing is sent to the device. A step with prefill chunks is a graph too while it is small
(`ChunkSteps`); else it is launched kernel by kernel, which its length hides.

Only `LaunchedStep.wait` waits for the device, for the ids (`HostIds`); and a step with a
grammar does, because the host needs the ids.

Of several stages each has some of the layers. All but the last compute states alone, which go to
the next stage between two graphs (`penstock.engine.ranks.device_pipeline`).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from penstock.engine.executors.awaited_ids import AwaitedIds, StepIds
from penstock.engine.executors.cuda.block_tier import GpuOffload
from penstock.engine.executors.cuda.chunk_steps import ChunkSteps
from penstock.engine.executors.cuda.decode_steps import DecodeSteps
from penstock.engine.executors.cuda.device import Device, Interpreter
from penstock.engine.executors.cuda.device_tables import DeviceTables
from penstock.engine.executors.cuda.draft_steps import DraftSteps
from penstock.engine.executors.cuda.launched_step import LaunchedStep, StageTime
from penstock.engine.executors.cuda.state_tiles import DeviceStates
from penstock.engine.executors.cuda.step_sampler import NoSampler, StepSampler
from penstock.engine.executors.loaded_model import LoadedModel
from penstock.engine.kernels.blocks import copy_blocks
from penstock.engine.kernels.sample.sampler import Mode
from penstock.engine.kernels.tables import store_sampled, update_table
from penstock.engine.models.decoder.fused import FusedModel
from penstock.engine.ranks.torch_ranks import SOLE_DEVICE, SoleDevice, TorchRanks
from penstock.engine.sampling.prompt_reader import PromptPart, PromptReader
from penstock.engine.sampling.sampler import ReadLogprobs
from penstock.engine.step.device_step import DraftSizes
from penstock.engine.step.executor import block_copies
from penstock.scheduler.cache.tier import BlockTier
from penstock.scheduler.drafts.limits import DraftLimits
from penstock.scheduler.stats import GraphSizes
from penstock.scheduler.types import (
    PromptOutput,
    Request,
    RequestId,
    SampledTokens,
    ScheduledBatch,
)


@dataclass(slots=True, kw_only=True)
class DeviceModel(LoadedModel):
    """A model on one GPU. adapters: whose weights are slots of the model's. use_graphs: where the
    model's attention can be captured. chunk_sizes: of `ChunkSteps`. ranks: that compute the model
    together. All execute the same batches, and rank 0 samples for all: after the graphs where these
    have sums over ranks, since NCCL allows only the same graph on all of them. num_graphs: to be
    captured. offload: to be set up after that, as pinning in a thread would break it. drafted:
    where decodes may have drafts, which the attention was made for too."""

    model: FusedModel
    tables: DeviceTables
    use_graphs: bool = True
    chunk_sizes: Sequence[int] = ()
    ranks: TorchRanks | SoleDevice = SOLE_DEVICE
    device: Device = field(default_factory=Interpreter)
    num_graphs: int = 0
    offload: GpuOffload | None = None
    drafted: DraftSizes | None = None


class CudaExecutor:
    """See `penstock.engine.step.executor.Executor`."""

    journals = ()
    tier: BlockTier | None = None
    """Set once the graphs have been captured."""

    def __init__(self, loaded: DeviceModel) -> None:
        model, tables, ranks, pool = loaded.model, loaded.tables, loaded.ranks, loaded.pool
        self.pool, self.adapters = pool, loaded.adapters
        self._model, self._tables, self._grammars = model, tables, loaded.grammars
        self._device = tables.lengths.device
        self._ranks, self._pipeline = ranks, ranks.pipeline
        self._has_stages = ranks.pipeline.num_stages > 1
        self._has_output_layer = ranks.pipeline.is_last
        self._stage_time: StageTime | None = None
        self._awaited = AwaitedIds()  # where this is the first stage
        self._samples = ranks.rank == 0
        self._samples_in_graphs = self._samples and ranks.tensor.size == 1
        self._sampler, sampler_of_graphs = self._make_sampler(loaded)
        self._prompts = PromptReader(loaded.info.vocab_size, model.logits_of_normed, loaded.pooled)
        self._launched: LaunchedStep | None = None
        self._states = None
        if pool.recurrent is not None and model.has_states:  # a stage may have no layers with any
            self._states = DeviceStates(pool.recurrent, tables, len(pool.groups))
        info, drafted = replace(loaded.info, runs_ahead=True), loaded.drafted
        use_graphs = loaded.use_graphs and model.attention.is_capturable
        self._decodes = DecodeSteps(
            model,
            tables,
            sampler_of_graphs,
            use_graphs=use_graphs,
            has_output_layer=self._has_output_layer,
            num_in_flight=info.max_in_flight,
            most_drafted=drafted.most_tokens if drafted else 0,
        )
        self._drafts: DraftSteps | None = None
        if drafted is not None:
            assert sampler_of_graphs is not None and not model.has_states, loaded.info
            self._drafts = DraftSteps(
                model, tables, sampler_of_graphs, drafted, self._decodes, use_graphs=use_graphs
            )
            limits = DraftLimits(drafted.most_tokens, drafted.queries - 1)
            info = replace(info, takes_drafts=True, draft_limits=limits)
        takes_chunks = use_graphs and model.attention.takes_decode_lens
        self._chunks = ChunkSteps(model, tables, loaded.chunk_sizes if takes_chunks else ())
        graph_sizes = GraphSizes(
            decodes=tuple(self._decodes.sizes),
            chunks=self._chunks.sizes,
            drafts=drafted.tokens if drafted else (),
        )
        self.info = replace(info, graph_sizes=graph_sizes)

    def _make_sampler(
        self, loaded: DeviceModel
    ) -> tuple[StepSampler | NoSampler, StepSampler | None]:
        """Returns what samples after the graphs, and in them."""
        seqs, vocab_size = loaded.max_num_seqs, loaded.info.vocab_size
        if not self._samples:
            return NoSampler(seqs, self._device), None
        drafted = loaded.drafted
        most_drafted = drafted.most_tokens if drafted else 0
        sampler = StepSampler(seqs, vocab_size, self._device, loaded.grammars, most_drafted)
        return sampler, sampler if self._samples_in_graphs else None

    def prepare(self, request: Request) -> "Future[Any] | None":
        self.adapters.prepare(request)
        return self._grammars.prepare(request)

    @torch.inference_mode()
    def capture(self, on_captured: Callable[[], None] = lambda: None) -> None:
        """Captures the graphs of all batch sizes, some 20 ms each, so that no request waits for
        one. Calls back after each."""
        self._chunks.capture(on_captured)
        self._decodes.capture(on_captured)
        if self._drafts is not None:
            self._drafts.capture(on_captured)

    def release(self, request_id: RequestId) -> None:
        self._grammars.release(request_id)
        self.adapters.release(request_id)

    @torch.inference_mode()
    def follow(self, batch: ScheduledBatch, sampled: Sequence[StepIds]) -> LaunchedStep:
        """This rank's part of a step, where it is not rank 0. sampled: where there are several
        stages, the ids of the steps that rank 0 has completed since the last call, in order."""
        if not self._has_stages or not self._pipeline.is_first:
            return self.execute(batch)  # the ids come on the device, or are not embedded here
        if ids := list(self._awaited.told(sampled)):
            update_table(self._tables.upload(ids), self._tables.token_table)
        self._awaited.assigned(batch)
        self._awaited.launched(batch)
        return self.execute(batch)

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> LaunchedStep:
        self._ranks.at(batch.step, "launching")
        self._apply(batch)
        launched = self._compute(batch) if self._has_output_layer else self._pass_on(batch)
        self._ranks.at(batch.step, "launched")
        return launched

    def _pass_on(self, batch: ScheduledBatch) -> LaunchedStep:
        """A step of a stage before the last, whose states the next one gets."""
        if batch.num_decodes == len(batch.slots):
            states, _ = self._decode(batch, Mode.PLAIN)
        else:
            states, _, _ = self._compute_chunks(batch, _query_starts(batch))
        if self._states is not None:
            self._states.snapshot_decodes(batch)
        self._end_stage()
        self._pipeline.send(states)
        nothing = SampledTokens(step=batch.step, token_ids=[])
        return self._launch(nothing, states.new_empty(0, dtype=torch.int32), [])

    def _launch(
        self,
        sampled: SampledTokens,
        ids: Tensor,
        slots: list[int],
        logprobs: ReadLogprobs | None = None,
        host_ids: Tensor | None = None,
        firsts: list[int] | None = None,
    ) -> LaunchedStep:
        # Rank 0 alone has a limit, since it tells the others to end.
        waits_for, time = self._ranks if self._samples else SOLE_DEVICE, self._stage_time
        return LaunchedStep(
            sampled, ids, slots, logprobs, self._grammars, waits_for, time, host_ids, firsts
        )

    def _receive(self, num_tokens: int) -> None:
        """Before a stage computes a step of so many tokens, padding included."""
        if self._has_stages:
            self._pipeline.receive(num_tokens)
            self._stage_time = StageTime(self._device)

    def _end_stage(self) -> None:
        if self._stage_time is not None:
            self._stage_time.end()

    def _compute(self, batch: ScheduledBatch) -> LaunchedStep:
        rows = [row for row, samples in enumerate(batch.samples) if samples]
        slots = [batch.slots[row] for row in rows]
        if self._grammars.constrains_any(slots):
            # A mask depends on the previous id, which is known where there are stages: then no
            # sequence is in two steps that are in flight.
            if self._launched and not self._has_stages:
                self._launched.wait()
            self._grammars.start(slots)
        if batch.drafts:
            return self._verify(batch)
        prompts: tuple[PromptOutput | None, ...] = ()
        ids = host_ids = None
        if batch.num_decodes == len(batch.slots):
            mode = self._sampler.graph_mode(slots) if self._samples_in_graphs else None
            logits, ids = self._decode(batch, Mode.PLAIN if mode is None else mode)
            logits = logits[: len(slots)]
            ids = None if mode is None else ids[: len(slots)]
            if ids is not None and self._decodes.host_ids is not None:
                host_ids = self._decodes.host_ids[: len(slots)]
            device_slots = self._decodes.slots[: len(slots)]
            lengths = self._decodes.context_lens[: len(slots)]
        else:
            logits, prompts, device_slots, lengths = self._run_chunks(batch, rows)
        if self._states is not None:
            self._states.snapshot_decodes(batch)
        if ids is None:
            ids = self._sample(batch, rows, logits, device_slots, lengths)
        sampled = SampledTokens(
            step=batch.step,
            token_ids=[],
            prompts=prompts,
            adapter_bytes=self.adapters.num_bytes(batch),
        )
        logprobs = self._sampler.logprobs(logits, slots, ids) if rows else None
        self._end_stage()
        # No slots where others sample, and the ids do not come here.
        self._launched = self._launch(sampled, ids, slots[: len(ids)], logprobs, host_ids)
        return self._launched

    def _verify(self, batch: ScheduledBatch) -> LaunchedStep:
        """A step of decodes, some of which have drafts: see `DraftSteps`."""
        drafts, query_starts, slots = self._drafts, _query_starts(batch), list(batch.slots)
        assert drafts is not None, batch
        mode = self._sampler.graph_mode(slots)
        adapters = self.adapters.runs(batch, query_starts)
        logits, ids = drafts(batch, adapters, Mode.PLAIN if mode is None else mode)
        counted = list(zip(batch.slots, batch.starts, batch.num_tokens, strict=True))
        token_slots = [slot for slot, _, num in counted for _ in range(num)]
        if mode is None:
            # The host knows the lengths of those rows alone that it samples, which have no drafts.
            lengths = [start + 1 + at for _, start, num in counted for at in range(num)]
            ids = self._sampler.sample_after_graph(
                logits,
                token_slots,
                lengths,
                drafts.slots[: len(ids)],
                drafts.next_positions[: len(ids)],
                self._tables.token_table,
            )
            drafts.accept(ids, len(slots))
        logprobs = self._sampler.logprobs(logits, token_slots, ids)
        num_bytes = self.adapters.num_bytes(batch)
        sampled = SampledTokens(step=batch.step, token_ids=[], adapter_bytes=num_bytes)
        accepted, host = drafts.accepted, drafts.host_accepted
        self._launched = self._launch(
            sampled, accepted, slots, logprobs, host, firsts=query_starts[:-1]
        )
        return self._launched

    def _sample(
        self,
        batch: ScheduledBatch,
        rows: list[int],
        logits: Tensor,
        device_slots: Tensor,
        device_lengths: Tensor,
    ) -> Tensor:
        """Samples these rows of the batch after the graph or kernels that computed their logits."""
        gets_ids = self._samples or not self._has_stages
        if not (rows and gets_ids):
            return device_slots.new_empty(0)
        slots = [batch.slots[row] for row in rows]
        lengths = [batch.starts[row] + batch.num_tokens[row] for row in rows]
        table = self._tables.token_table
        ids = self._sampler.sample_after_graph(
            logits, slots, lengths, device_slots, device_lengths, table
        )
        if not self._has_stages:
            self._ranks.tensor.broadcast(ids)  # all embed them in the next step
        store_sampled(ids, device_slots, device_lengths, table)
        return ids

    def _apply(self, batch: ScheduledBatch) -> None:
        """Updates the tables, in the order that `ScheduledBatch` states."""
        self._tables.apply(batch)
        for assignment in batch.assignments:
            self._sampler.assign(assignment)
            if self._samples:
                self._grammars.assign(assignment)
            if self._has_output_layer:
                self._prompts.assign(assignment)
            self.adapters.assign(assignment)
        self._sampler.flush()
        if batch.copies:
            for group, pool in enumerate(self.pool.groups):
                copies = self._tables.upload(block_copies(batch.copies, group))
                for pair in pool.pairs() if len(copies) else ():
                    copy_blocks(copies, *pair)
            if self._states is not None:
                self._states.copy(batch)

    def _decode(self, batch: ScheduledBatch, mode: Mode) -> tuple[Tensor, Tensor]:
        """See `DecodeSteps`."""
        adapters = self.adapters.runs(batch, range(len(batch.slots) + 1))
        self._receive(self._decodes.size_for(len(batch.slots)))
        return self._decodes(batch.slots, adapters, mode)

    def _run_chunks(
        self, batch: ScheduledBatch, rows: list[int]
    ) -> tuple[Tensor, tuple[PromptOutput | None, ...], Tensor, Tensor]:
        """A step with prefill chunks: the sampling rows' logits, the outputs of prompts, and the
        slots and lengths of the sampling rows."""
        query_starts = _query_starts(batch)
        last_tokens = [query_starts[row + 1] - 1 for row in rows]
        parts = self._prompts.parts(batch, query_starts)
        prompt_tokens = [token for part in parts for token in part.rows]
        states, slots, lengths = self._compute_chunks(batch, query_starts)
        # One transfer for all.
        indices = self._tables.upload((*rows, *last_tokens, *prompt_tokens)).long()
        sampling, wanted = indices[: len(rows)], indices[len(rows) :]
        states = states[wanted]
        prompts = self._read_prompts(parts, states[len(rows) :])
        logits = self._model.logits(states[: len(rows)]) if rows else states.new_empty(0)
        return logits, prompts, slots[sampling], lengths[sampling]

    def _compute_chunks(
        self, batch: ScheduledBatch, query_starts: list[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `ChunkSteps`."""
        num_tokens = query_starts[-1]
        self._receive(self._chunks.size_for(num_tokens) or num_tokens)
        return self._chunks(batch, query_starts, self.adapters.runs(batch, query_starts))

    def _read_prompts(
        self, parts: list[PromptPart], states: Tensor
    ) -> tuple[PromptOutput | None, ...]:
        if not parts:
            return ()
        normed = self._model.normed(states)
        return self._prompts.read(parts, normed, self._tables.token_table)


def _query_starts(batch: ScheduledBatch) -> list[int]:
    """Each row's offset into the tokens, and their number."""
    return [0, *accumulate(batch.num_tokens)]
