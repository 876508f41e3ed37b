"""`CudaExecutor`: a transformer on one GPU; the host schedules and launches one step ahead.

A step of decodes alone is a CUDA graph, from the gather of its tokens to the sampled ids: it reads
and writes per-slot tables (`DeviceTables`, `StepSampler`), so between two steps of the same
sequences nothing is sent to the device. A step with prefill chunks is a graph too while it is small
(`ChunkGraphs`); else it is launched kernel by kernel, which its length hides.

Only `LaunchedStep.wait` waits for the device, for the ids that it copies out; and a step with a
grammar or logprobs does, because the host needs the ids.

Of several stages each has some of the layers. All but the last compute states alone, which go to
the next stage between two graphs (`penstock.engine.ranks.device_pipeline`).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.engine.executors.awaited_ids import AwaitedIds
from penstock.engine.executors.cuda.adapter_tiles import TileMemory, tiles_of
from penstock.engine.executors.cuda.chunk_graphs import CHUNK_SIZES, ChunkGraphs
from penstock.engine.executors.cuda.device_tables import DeviceTables
from penstock.engine.executors.cuda.graphs import StepGraphs, captured_sizes
from penstock.engine.executors.cuda.stage_time import StageTime
from penstock.engine.executors.cuda.state_tiles import DeviceStates
from penstock.engine.executors.cuda.state_tiles import tiles_of as state_tiles_of
from penstock.engine.executors.cuda.step_sampler import GRAPH_MODES, NoSampler, StepSampler
from penstock.engine.kernels.blocks import copy_blocks
from penstock.engine.kernels.sample.sampler import Mode
from penstock.engine.kernels.tables import (
    gather_chunks,
    gather_decodes,
    store_lengths,
    store_sampled,
    update_table,
)
from penstock.engine.memory.pool.kv_pool import KVPools
from penstock.engine.models.decoder.fused import FusedModel
from penstock.engine.models.lora.store import Adapters
from penstock.engine.ranks.torch_ranks import TorchRanks
from penstock.engine.sampling.grammar_table import GrammarTable
from penstock.engine.sampling.prompt_reader import PromptPart, PromptReader
from penstock.engine.sampling.sampler import failed_rows
from penstock.engine.step.device_step import DeviceStep
from penstock.engine.step.executor import block_copies, check_no_adapter
from penstock.engine.step.model_info import ModelInfo
from penstock.engine.step.model_input import AdapterRun
from penstock.scheduler.cache.tier import BlockTier
from penstock.scheduler.stats import GraphSizes
from penstock.scheduler.types import (
    PromptOutput,
    Request,
    RequestId,
    SampledTokens,
    ScheduledBatch,
    TokenLogprobs,
)


class LaunchedStep:
    """`PendingTokens` of a step that the device may not have finished."""

    def __init__(
        self,
        step: int,
        ids: Tensor,
        slots: list[int],
        logprobs: list[TokenLogprobs | None] | None,
        prompts: tuple[PromptOutput | None, ...],
        grammars: GrammarTable,
        adapter_bytes: int = 0,
        ranks: TorchRanks | None = None,
        stage_time: StageTime | None = None,
    ) -> None:
        """ids: (S,) on the device, of the sampling rows, whose slots these are. adapter_bytes: as
        in `StepWork`. ranks: the others that the device waits for, where they have a limit.
        stage_time: where there are several stages."""
        self.step = step
        self.stage_time = stage_time
        self._ranks = ranks
        self._slots = slots
        self._logprobs = logprobs
        self._prompts = prompts
        self._grammars = grammars
        self._adapter_bytes = adapter_bytes
        self._constraints = grammars.constraints(slots)
        self._sampled: SampledTokens | None = None
        on_gpu = ids.is_cuda
        self._ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=on_gpu)
        self._ids.copy_(ids, non_blocking=True)
        self._event = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        if self._event:
            self._event.record()

    def wait(self) -> SampledTokens:
        """The first call also advances the grammars by the sampled ids."""
        if self._sampled is None:
            self.wait_for_device()
            ids = self._ids.tolist()
            of_grammars = self._grammars.advance(self._slots, ids, self._constraints)
            self._sampled = SampledTokens(
                step=self.step,
                token_ids=ids,
                logprobs=self._logprobs,
                failed=failed_rows(ids, of_grammars),
                prompts=self._prompts,
                adapter_bytes=self._adapter_bytes,
            )
        return self._sampled

    def wait_for_device(self) -> None:
        """Raises RankFailed where the others do not come."""
        if self._event and self._ranks:
            self._ranks.wait_for(self._event)
        elif self._event:
            self._event.synchronize()


class DecodeKey(NamedTuple):
    """Of a graph. size: of rows. has_adapters: some may have one."""

    size: int
    mode: Mode
    has_adapters: bool


class CudaExecutor:
    """See `penstock.engine.step.executor.Executor`. `penstock.engine.loading.gpu` builds
    one."""

    tier: BlockTier | None = None
    """Set once the graphs have been captured."""

    def __init__(
        self,
        model: FusedModel,
        pool: KVPools,
        tables: DeviceTables,
        grammars: GrammarTable,
        info: ModelInfo,
        *,
        max_num_seqs: int,
        adapters: Adapters | None = None,
        use_graphs: bool = True,
        chunk_sizes: Sequence[int] | None = None,
        ranks: TorchRanks | None = None,
    ) -> None:
        """adapters: whose weights are slots of the model's; None where it has none. use_graphs:
        where the model's attention can be captured. chunk_sizes: of `ChunkGraphs`; None means its
        default on a GPU, and none on CPU, where padding only costs. ranks: that compute the model
        together. All execute the same batches, and rank 0 samples for all: after the graphs where
        these have sums over ranks, since NCCL allows only the same graph on all of them.
        """
        self._model = model
        self._pool = pool
        self._tables = tables
        self._grammars = grammars
        device = tables.lengths.device
        self._device = device
        self._ranks = ranks
        self._group = None if ranks is None else ranks.tensor
        self._pipeline = None if ranks is None else ranks.pipeline
        self._has_output_layer = self._pipeline is None or self._pipeline.after is None
        self._stage_time: StageTime | None = None
        self._awaited = AwaitedIds()  # where this is the first stage
        self._samples = ranks is None or ranks.rank == 0
        self._sampler: StepSampler | NoSampler = NoSampler(max_num_seqs, device)
        if self._samples:
            self._sampler = StepSampler(max_num_seqs, info.vocab_size, device, grammars)
        self._prompts = PromptReader(info.vocab_size, model.logits_of_normed)
        self._decode_slots: tuple[int, ...] = ()
        self._decode_adapters: tuple[int, tuple[AdapterRun, ...]] = 0, ()
        self._adapters = adapters
        self._launched: LaunchedStep | None = None
        self._states = None
        if pool.recurrent is not None and model.has_states:  # a stage may have no layers with any
            self._states = DeviceStates(pool.recurrent, tables, len(pool.groups))

        def buffer(dtype: torch.dtype) -> Tensor:
            return torch.zeros(max_num_seqs, dtype=dtype, device=device)

        self._slots = torch.full_like(buffer(torch.int32), tables.padding_slot)
        self._token_ids, self._positions = buffer(torch.int32), buffer(torch.int32)
        self._context_lens = buffer(torch.int32)
        self._kv_slots = [buffer(torch.int64) for _ in tables.block_tables]
        self._sizes = captured_sizes(max_num_seqs)
        self._tiles = TileMemory(tables, self._sizes, model.num_adapter_slots)
        self._graphs = StepGraphs(
            self._run_decodes, device, enabled=use_graphs and model.is_capturable
        )
        if chunk_sizes is None:
            chunk_sizes = CHUNK_SIZES if device.type == "cuda" else ()
        if not (use_graphs and model.is_capturable and model.takes_decode_lens):
            chunk_sizes = ()
        self._chunk_graphs = ChunkGraphs(model, tables, chunk_sizes, max_num_seqs)
        graph_sizes = GraphSizes(decodes=tuple(self._sizes), chunks=tuple(chunk_sizes))
        self._info = replace(info, runs_ahead=True, graph_sizes=graph_sizes)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def runs_ahead(self) -> bool:
        return self._info.runs_ahead

    @property
    def adapters(self) -> Adapters | None:
        return self._adapters

    @property
    def journals(self) -> tuple[()]:
        return ()

    @property
    def pool(self) -> KVPools:
        return self._pool

    def prepare(self, request: Request) -> "Future[Any] | None":
        if self._adapters is None:
            check_no_adapter(request)
        else:
            self._adapters.prepare(request)
        return self._grammars.prepare(request)

    @torch.inference_mode()
    def capture(self, on_captured: Callable[[], None] = lambda: None) -> None:
        """Captures the graphs of all batch sizes, some 20 ms each, so that no request waits for
        one. Calls back after each."""
        self._chunk_graphs.capture(on_captured)
        kinds = (True, False) if self._model.num_adapter_slots else (False,)
        keys = (
            DecodeKey(size, mode, kind)
            for size in reversed(self._sizes)
            for kind in kinds
            for mode in (GRAPH_MODES if self._samples_in_graphs else GRAPH_MODES[-1:])
        )
        self._graphs.capture(keys, on_captured)

    def release(self, request_id: RequestId) -> None:
        self._grammars.release(request_id)
        if self._adapters is not None:
            self._adapters.release(request_id)

    @torch.inference_mode()
    def follow(self, batch: ScheduledBatch, sampled: Sequence[Sequence[int]]) -> LaunchedStep:
        """This rank's part of a step, where it is not rank 0. sampled: where there are several
        stages, the ids of the steps that rank 0 has completed since the last call, in order."""
        if self._pipeline is None or self._pipeline.before is not None:
            return self.execute(batch)  # the ids come on the device, or are not embedded here
        if ids := list(self._awaited.told(sampled)):
            update_table(self._tables.upload(ids), self._tables.token_table)
        self._awaited.assigned(batch)
        self._awaited.launched(batch)
        return self.execute(batch)

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> LaunchedStep:
        if self._ranks is not None:
            self._ranks.at(batch.step, "launching")
        self._apply(batch)
        launched = self._compute(batch) if self._has_output_layer else self._pass_on(batch)
        if self._ranks is not None:
            self._ranks.at(batch.step, "launched")
        return launched

    @property
    def _samples_in_graphs(self) -> bool:
        return self._samples and self._group is None

    def _pass_on(self, batch: ScheduledBatch) -> LaunchedStep:
        """A step of a stage before the last, whose states the next one gets."""
        assert self._pipeline is not None
        if batch.num_decodes == len(batch.slots):
            states, _ = self._decode(batch, Mode.PLAIN)
        else:
            query_starts = _query_starts(batch)
            states, _, _ = self._compute_chunks(batch, query_starts)
        if self._states is not None:
            self._states.snapshot_decodes(batch)
        self._end_stage()
        self._pipeline.send(states)
        nothing = states.new_empty(0, dtype=torch.int32)
        return LaunchedStep(
            batch.step, nothing, [], None, (), self._grammars, stage_time=self._stage_time
        )

    def _receive(self, num_tokens: int) -> None:
        """Before a stage computes a step of so many tokens, padding included."""
        if self._pipeline is not None:
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
            if self._launched and self._pipeline is None:
                self._launched.wait()
            self._grammars.start(slots)
        prompts: tuple[PromptOutput | None, ...] = ()
        ids: Tensor | None = None
        if batch.num_decodes == len(batch.slots):
            mode = self._sampler.graph_mode(slots) if self._samples_in_graphs else None
            logits, ids = self._decode(batch, Mode.PLAIN if mode is None else mode)
            logits = logits[: len(slots)]
            ids = None if mode is None else ids[: len(slots)]
            device_slots, lengths = self._slots[: len(slots)], self._context_lens[: len(slots)]
        else:
            logits, prompts, device_slots, lengths = self._run_chunks(batch, rows)
        if self._states is not None:
            self._states.snapshot_decodes(batch)
        if ids is None:
            ids = self._sample(batch, rows, logits, device_slots, lengths)
        logprobs = self._sampler.logprobs(logits, slots, ids) if rows else None
        self._end_stage()
        self._launched = LaunchedStep(
            batch.step,
            ids,
            slots[: len(ids)],  # none where others sample, and the ids do not come here
            logprobs,
            prompts,
            self._grammars,
            0 if self._adapters is None else self._adapters.num_bytes(batch),
            self._ranks if self._samples else None,
            self._stage_time,
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
        gets_ids = self._samples or self._pipeline is None
        if not (rows and gets_ids):
            return device_slots.new_empty(0)
        slots = [batch.slots[row] for row in rows]
        lengths = [batch.starts[row] + batch.num_tokens[row] for row in rows]
        table = self._tables.token_table
        ids = self._sampler.sample_after_graph(
            logits, slots, lengths, device_slots, device_lengths, table
        )
        if self._group is not None and self._pipeline is None:
            self._group.broadcast(ids)  # all embed them in the next step
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
            if self._adapters is not None:
                self._adapters.assign(assignment)
        self._sampler.flush()
        if batch.copies:
            for group, pool in enumerate(self._pool.groups):
                copies = self._tables.upload(block_copies(batch.copies, group))
                for keys, values in pool.pairs() if len(copies) else ():
                    copy_blocks(copies, keys, values)
            if self._states is not None:
                self._states.copy(batch)

    def _runs(self, batch: ScheduledBatch, query_starts: Sequence[int]) -> tuple[AdapterRun, ...]:
        return () if self._adapters is None else self._adapters.runs(batch, query_starts)

    def _decode(self, batch: ScheduledBatch, mode: Mode) -> tuple[Tensor, Tensor]:
        """Logits of one token for each slot, or its states before the last stage; and the sampled
        ids. Of both, there are as many rows as of the graph: (rows, vocab_size or hidden_size)."""
        slots = batch.slots
        size = next(size for size in self._sizes if size >= len(slots))
        if slots != self._decode_slots:
            padding = (self._tables.padding_slot,) * (len(self._slots) - len(slots))
            self._slots.copy_(self._tables.upload((*slots, *padding)))
            self._decode_slots = slots
        adapters = self._runs(batch, range(len(slots) + 1))
        if adapters and (size, adapters) != self._decode_adapters:
            self._tiles.write(adapters, size)
            self._decode_adapters = size, adapters
        self._receive(size)
        return self._graphs(DecodeKey(size, mode, bool(adapters)))

    def _run_decodes(self, key: DecodeKey) -> tuple[Tensor, Tensor]:
        """A whole step of `size` decodes, in memory that does not move: what the graph captures."""
        size, mode, has_adapters = key
        tables = self._tables
        slots, context_lens = self._slots[:size], self._context_lens[:size]
        kv_slots = [of_group[:size] for of_group in self._kv_slots]
        step = DeviceStep(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            kv_slots=kv_slots[0],
            slots=slots,
            context_lens=context_lens,
            num_decodes=size,
            chunk_starts=None,
            block_tables=tables.block_tables[0],
            more_groups=tuple(zip(kv_slots[1:], tables.block_tables[1:], strict=True)),
            adapters=self._tiles.read(size) if has_adapters else None,
        )
        for each in step.of_groups:
            gather_decodes(
                slots,
                tables.lengths,
                tables.token_table,
                each.block_tables,
                tables.block_size,
                step.token_ids,
                step.positions,
                each.kv_slots,
                context_lens,
            )
        states = self._model(step)
        if not self._has_output_layer:
            store_lengths(slots, context_lens, tables.lengths)
            return states, step.token_ids
        logits = self._model.logits(states)
        store_lengths(slots, context_lens, tables.lengths)
        if not self._samples_in_graphs:
            return logits, step.token_ids  # which nobody reads: see `_sample`
        assert isinstance(self._sampler, StepSampler), self._sampler
        ids = self._sampler.sample(logits, slots, context_lens, mode)
        store_sampled(ids, slots, context_lens, tables.token_table)
        return logits, ids

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
        """The states of all tokens, slots and lengths of all rows; with padding after, where it is
        a graph."""
        padded = self._chunk_graphs.size_for(query_starts[-1])
        self._receive(padded or query_starts[-1])
        compute = self._launch if padded is None else self._chunk_graphs
        return compute(batch, query_starts, self._runs(batch, query_starts))

    def _launch(
        self, batch: ScheduledBatch, query_starts: list[int], adapters: tuple[AdapterRun, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The states of all tokens, slots and lengths of all rows; kernel by kernel."""
        tables, num_rows = self._tables, len(batch.slots)
        values = tables.upload((*batch.slots, *batch.starts, *query_starts))
        slots, starts, offsets = torch.split(values, [num_rows, num_rows, num_rows + 1])
        num_tokens = query_starts[-1]
        token_ids, positions = values.new_empty(2, num_tokens).unbind()
        shape = len(tables.block_tables), num_tokens
        kv_slots = torch.empty(shape, dtype=torch.int64, device=self._device).unbind()
        context_lens = torch.empty_like(slots)
        step = DeviceStep(
            token_ids=token_ids,
            positions=positions,
            kv_slots=kv_slots[0],
            slots=slots,
            context_lens=context_lens,
            num_decodes=batch.num_decodes,
            chunk_starts=offsets[batch.num_decodes :] - batch.num_decodes,
            block_tables=tables.block_tables[0],
            more_groups=tuple(zip(kv_slots[1:], tables.block_tables[1:], strict=True)),
            adapters=tiles_of(adapters, num_tokens, self._model.num_adapter_slots, tables),
            state_tiles=state_tiles_of(batch, query_starts, tables) if self._states else None,
        )
        for each in step.of_groups:
            gather_chunks(
                slots,
                starts,
                offsets,
                tables.token_table,
                each.block_tables,
                tables.block_size,
                max(batch.num_tokens),
                token_ids,
                positions,
                each.kv_slots,
                context_lens,
            )
        states = self._model(step)
        store_lengths(slots, context_lens, tables.lengths)
        return states, slots, context_lens

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
