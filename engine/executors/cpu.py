"""`CpuExecutor`: a transformer over a paged KV pool, on this machine's processor.

It holds what a step needs of every sequence, its token ids and its block table, in one row per
slot; a batch brings only differences. Sampled ids are written to the token table, where the next
step reads them.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import CDLL
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.config import AttentionBackend, Dtype, EngineConfig, KVCacheDtype
from penstock.engine.executors.awaited_ids import AwaitedIds
from penstock.engine.executors.loading import (
    Ledger,
    check_dtype,
    check_quantization,
    choose_dtype,
    describe,
    log_text_only,
    log_widening,
    most_adapter_bytes,
    of_ranks,
    reading,
    weight_bytes,
    weight_source,
)
from penstock.engine.executors.rank_pools import pool_memory, pools_of_others
from penstock.engine.files.gguf.file import is_gguf
from penstock.engine.kernels.attention.gathered import gathered_attention
from penstock.engine.memory.dtypes import kv_dtype
from penstock.engine.memory.hardware import matmul_flops, read_bandwidth
from penstock.engine.memory.host import Arena
from penstock.engine.memory.machine import available_memory_bytes, num_cores, total_memory_bytes
from penstock.engine.memory.pool.kept import KeptMemory, identity_of
from penstock.engine.memory.pool.kv_pool import (
    KVPools,
    PoolSize,
    resolve_max_model_len,
    size_cpu_pool,
)
from penstock.engine.memory.tiers.disk_tier import DiskTier
from penstock.engine.memory.tiers.offload import block_files, disk_tier, refuse_with_states
from penstock.engine.memory.tiers.pool_bytes import PoolBytes, StepsInFlight
from penstock.engine.models.at_load.quantize import quantization_plan, quantize
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.gathered import GatheredModel, least
from penstock.engine.models.decoder.model import LlamaModel, Model
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.division.stage import Stage
from penstock.engine.models.errors import (
    InvalidModel,
    UnsupportedFeature,
    UnsupportedWeightFormat,
)
from penstock.engine.models.gguf.weights import weight_formats as gguf_formats
from penstock.engine.models.layers.kept import AsStored
from penstock.engine.models.layers.linear import MakeLinear, PlainLinear, cpu_linear
from penstock.engine.models.lora.store import Adapters
from penstock.engine.models.lora.weights import RankPart
from penstock.engine.models.parts.adapter import Adapter
from penstock.engine.models.parts.delta_net.layer import Recurrence, torch_recurrence
from penstock.engine.models.parts.source import Empty
from penstock.engine.native.features import check_features, may_code_kv
from penstock.engine.native.inputs import gather_input
from penstock.engine.native.library import load_delta_net_library, load_library
from penstock.engine.native.model import NativeModel
from penstock.engine.native.packing import FORMATS
from penstock.engine.native.parts.delta_net import NativeRecurrence
from penstock.engine.process.phases import Phases
from penstock.engine.ranks.group import Group
from penstock.engine.ranks.layout import RankLayout
from penstock.engine.ranks.pipeline import Pipeline
from penstock.engine.sampling.grammar import Grammars
from penstock.engine.sampling.grammar_table import GrammarTable
from penstock.engine.sampling.prompt_reader import PromptPart, PromptReader
from penstock.engine.sampling.sampler import Sampler, argmax, failed_rows
from penstock.engine.step.executor import block_copies
from penstock.engine.step.model_info import ModelInfo
from penstock.engine.step.model_input import ModelInput, build_model_input
from penstock.scheduler.cache.journal import BlockJournal
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.types import PromptOutput, Request, RequestId, SampledTokens, ScheduledBatch

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_DEFAULT_BLOCK_SIZE = 16
# Read once at start for the metrics: larger than any last-level cache we know; it takes 30 ms.
BANDWIDTH_PROBE_BYTES = 256 * 2**20


class CpuExecutor:
    """See `penstock.engine.step.executor.Executor`."""

    _native: NativeModel | None = None
    _tier: DiskTier | None = None
    _everyone: Group | None = None
    _pipeline: Pipeline | None = None

    def __init__(
        self,
        config: EngineConfig,
        model_dir: Path,
        phases: Phases | None = None,
        group: Group | None = None,
        pipeline: Pipeline | None = None,
        rank_pools: Sequence[int] = (),
    ) -> None:
        """Of ranks that compute the model together, each in a process of its own, group: those that
        split each layer; pipeline: where there are several stages. rank_pools: see
        `penstock.engine.executors.rank_pools`."""
        if config.attention_backend is not AttentionBackend.AUTO:
            raise InvalidConfig(
                f"--attention-backend {config.attention_backend} is for a GPU, and the model runs "
                "on the CPU, which has one implementation of attention; leave the flag out"
            )
        check_quantization(config, model_dir)
        phases = phases or Phases()
        # The server's process shares them: a thread that it interrupts holds up no other.
        everyone = pipeline.everyone if pipeline else group
        num_ranks = everyone.size if everyone else 1
        num_threads = config.num_threads or max(1, num_cores() // num_ranks)
        self._everyone, self._pipeline = everyone, pipeline
        self.steps_in_flight = StepsInFlight()
        whole = model = ModelConfig.from_dir(model_dir)
        check_dtype(config.dtype, model)
        if any(model.recurrent):
            refuse_with_states(config)
        shard = None if group is None else Shard(whole, group.rank, group.size)
        if shard is not None:
            model = shard.config
        of_all_layers = model
        stage = None if pipeline is None else Stage(model, pipeline.stage, pipeline.num_stages)
        if stage is not None:
            model = stage.config
        block_size = config.block_size or _DEFAULT_BLOCK_SIZE
        with phases.timed("compile", "loading the step that is compiled for this processor"):
            if everyone and everyone.rank:
                everyone.barrier()  # rank 0 compiles for all
            self._dtype, library = _dtype_and_library(config, of_all_layers, model_dir)
            if everyone and not everyone.rank:
                everyone.barrier()
        kv_type = kv_dtype(config.kv_cache_dtype, self._dtype)

        make_linear: MakeLinear = PlainLinear
        if library is None:
            make_linear = cpu_linear(self._dtype, has_experts=model.experts is not None)
        kept = AsStored(() if library is None else FORMATS)
        log_text_only(config, model)
        log_widening(model, self._dtype, kept)
        # Before the weights are read, so that a model that does not fit is reported at once.
        plan = quantization_plan(config.quantization, model, self._dtype, stage=stage)
        num_weight_bytes = weight_bytes(
            model, config.load_format, model_dir, self._dtype, kept=kept, plan=plan, stage=stage
        )
        longest = resolve_max_model_len(config.max_model_len, model.max_model_len)
        layout = of_all_layers.kv_layout(longest)
        if stage is None:
            pools = layout.pools(model.kv_shape, block_size, kv_type.itemsize)
        else:
            pools = stage.pools(layout, block_size, kv_type.itemsize)
            layout = stage.layout(layout)
        # What decides the bytes of a block of the same tokens.
        compiled = None if library is None else Path(library._name).name
        formats = (self._dtype, kv_type, config.load_format, config.quantization)
        ranks = RankLayout(group.size if group else 1, pipeline.num_stages if pipeline else 1)
        divided = (ranks,) if everyone else ()
        identity = identity_of(model_dir, model, formats, block_size, compiled, layout, *divided)
        files = None if self._is_follower else block_files(config, identity)
        kept_kv = None
        if rank_pools and everyone:
            kept_kv = pool_memory(rank_pools, everyone.rank)
        elif config.kv_memory is not None and everyone is None and layout.state is None:
            key = files.key if files else None
            kept_kv = KeptMemory(config.kv_memory, identity, key)
        if everyone:
            everyone.barrier()  # the memory that is free is divided before anybody takes some
        available = available_memory_bytes()
        size = size_cpu_pool(
            config,
            pools,
            weight_bytes=num_weight_bytes,
            max_model_len=model.max_model_len,
            kept=kept_kv,
            num_ranks=num_ranks,
        )
        if everyone:
            num_blocks, *more_blocks, max_len = least(
                everyone, [*size.of_groups, size.max_model_len]
            )
            size = PoolSize(num_blocks, max_len, tuple(more_blocks))
        quantized = None
        if plan is not None:
            with torch.inference_mode():
                quantized = quantize(
                    config, model_dir, plan, phases, num_threads, shard=shard, stage=stage
                )
        what = reading(num_weight_bytes, self._dtype)
        with phases.timed("weights", what, total=num_weight_bytes), torch.inference_mode():
            # The threads that read are Python's; each of torch's calls inside them uses one.
            torch.set_num_threads(1)
            self._model: Model
            empty = self._empty(in_arena=library is not None)
            source = weight_source(
                config.load_format,
                model_dir,
                model,
                empty,
                phases,
                quantized,
                make_linear=make_linear,
                kept=kept,
                shard=shard,
            )
            self._model = llama = LlamaModel(
                model,
                source if stage is None else stage.of(source),
                make_linear,
                gathered_attention,
                max_model_len=size.max_model_len,
                device=_CPU,
                num_load_threads=num_threads,
                shard=shard,
                group=group,
                recurrence=_recurrence(model, num_threads),
                stage=stage,
                pipeline=pipeline,
                dtype=self._dtype,
            )
            torch.set_num_threads(num_threads)
        self._build_input = build_model_input
        make_adapter: Callable[[Adapter], Any] = _as_it_is
        products = "torch"
        argmax_of: Callable[[Tensor], Tensor] = argmax
        with phases.timed("kv_pool", "allocating the pool of keys and values"):
            shape = model.kv_shape
            self._pool = KVPools(shape, layout, size.of_groups, block_size, kv_type, _CPU, kept_kv)
            if rank_pools and everyone:
                everyone.barrier()  # so that rank 0 finds all pools
            if files is not None:
                pools_of_all = [self._pool]
                if rank_pools:
                    of_rank = (ranks, whole, longest, size.of_groups, block_size, kv_type)
                    pools_of_all += pools_of_others(rank_pools, *of_rank)
                self._tier = disk_tier(files, PoolBytes(pools_of_all, self.steps_in_flight))
            if library is not None:
                try:
                    native = NativeModel(library, llama, self._pool, num_threads)
                    self._model = self._native = native
                    self._build_input = partial(gather_input, library)
                    products, argmax_of = native.products, native.argmax
                    make_adapter = native.packed_adapter
                except UnsupportedWeightFormat as error:
                    _warn_of_torch(error)
        if group:
            self._model = GatheredModel(self._model, group, whole.vocab_size)
        computed_by = f"{products}, {num_threads} thread{'s' if num_threads > 1 else ''}"
        if num_ranks > 1:
            computed_by += f" in each of {num_ranks} processes"
        logger.info("computed by %s", computed_by)
        if everyone:
            everyone.barrier()  # so that each measures its share
        with phases.timed("bandwidth", "measuring how fast memory is read"):
            measured = read_bandwidth(BANDWIDTH_PROBE_BYTES)
        with phases.timed("flops", "measuring how fast matrices are multiplied"):
            flops = matmul_flops(self._dtype)

        self._adapters = Adapters(
            config.lora,
            model,
            self._dtype,
            _CPU,
            config.scheduler.max_num_seqs,
            make_adapter,
            part=RankPart(whole=whole, shard=shard, first_layer=llama.first_layer),
        )
        self._make_tables(config, model_dir, whole.vocab_size, model.eos_token_ids, size, argmax_of)
        self._info = describe(
            model,
            self._dtype,
            "cpu",
            size,
            block_size,
            measured,
            phases.seconds,
            flops,
            weight_bytes=llama.step_weight_bytes,
            expert_bytes=llama.expert_bytes,
            kv_dtype=kv_type,
            computed_by=computed_by,
            quantization=quantized.info if quantized else None,
            layout=layout,
        )
        if everyone:
            self._info = of_ranks(
                self._info,
                whole,
                tensor_size=ranks.tensor_size,
                num_stages=ranks.num_stages,
            )
        total = total_memory_bytes()
        own_pools = layout.pools(model.kv_shape, block_size, kv_type.itemsize)
        Ledger(
            total=total,
            others=total - available,
            weights=num_weight_bytes,
            kv_pool=size.num_bytes(own_pools),
            adapters=most_adapter_bytes(config.lora, model, self._dtype),
        ).log(size, own_pools)

    def _make_tables(
        self,
        config: EngineConfig,
        model_dir: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        size: PoolSize,
        argmax_of: Callable[[Tensor], Tensor] = argmax,
    ) -> None:
        """Once there are a model and a pool: what the step holds of each slot."""
        max_num_seqs = config.scheduler.max_num_seqs
        max_blocks = -(-size.max_model_len // self._pool.block_size)
        self._token_table = torch.zeros(max_num_seqs, size.max_model_len + 1, dtype=torch.int64)
        # The same memory: a number takes numpy a tenth of torch's time.
        self._tokens = self._token_table.numpy()
        num_groups = len(self._pool.all_groups)
        tables = torch.zeros(num_groups, max_num_seqs, max_blocks, dtype=torch.int32)
        self._group_tables = tables.unbind()
        self._block_tables = tables if num_groups > 1 else tables[0]
        self._prompt_lengths = [0] * max_num_seqs
        self._awaited = AwaitedIds()  # where this rank is not rank 0
        grammars = Grammars.of_model(model_dir, vocab_size, eos_token_ids, config.load_format)
        if not self._is_follower:
            grammars.load_tokenizer()
        self._grammars = GrammarTable(grammars, max_num_seqs, vocab_size)
        self._sampler = Sampler(max_num_seqs, vocab_size, _CPU, self._grammars, argmax_of)
        self._prompts = PromptReader(vocab_size, self._model.logits)

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

    def _empty(self, *, in_arena: bool) -> Empty:
        """Memory for weights: an arena where they stay as they are read, and are not packed."""
        if in_arena:
            return partial(Arena().empty, dtype=self._dtype)
        return partial(torch.empty, dtype=self._dtype)

    def _tensor(self, values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)


def _dtype_and_library(
    config: EngineConfig, model: ModelConfig, model_dir: Path
) -> tuple[torch.dtype, CDLL | None]:
    dtype = choose_dtype(config.dtype, _CPU)
    if any(model.recurrent):
        _warn_of_torch("the compiled step has no gated delta nets")
        return dtype, None
    if reason := _unsupported_kv(config.kv_cache_dtype, model):
        _warn_of_torch(reason)
        return dtype, None
    build = partial(
        load_library,
        formats=_weight_formats(config, model, model_dir, dtype),
        has_coded_kv=config.kv_cache_dtype is KVCacheDtype.INT8,
    )
    if config.dtype is Dtype.AUTO and dtype is not torch.bfloat16:
        # Torch is slow in bfloat16 where the processor cannot multiply it. The compiled step is
        # not: it widens weights as it reads them, and half as many bytes are read.
        library = _library_for(model, torch.bfloat16, build)
        if library is not None:
            return torch.bfloat16, library
    return dtype, _library_for(model, dtype, build)


def _weight_formats(
    config: EngineConfig, model: ModelConfig, model_dir: Path, dtype: torch.dtype
) -> frozenset[str]:
    """Of the linear layers that will not be plain."""
    if plan := quantization_plan(config.quantization, model, dtype):
        return plan.weight_formats
    return gguf_formats(model_dir) if is_gguf(model_dir) else model.weight_formats


def _unsupported_kv(wanted: KVCacheDtype, model: ModelConfig) -> str | None:
    """Why the compiled step has no such KV cache."""
    if wanted is KVCacheDtype.FP8:
        return "the compiled step has no KV cache in fp8; use --kv-cache-dtype int8"
    if wanted is KVCacheDtype.INT8 and not may_code_kv(model):
        return f"the compiled step has no KV cache in int8 for a head_dim of {model.head_dim}"
    return None


def _library_for(
    model: ModelConfig, dtype: torch.dtype, build: Callable[[torch.dtype], CDLL | None]
) -> CDLL | None:
    """None where torch computes the model."""
    try:
        check_features(model, dtype)
    except UnsupportedFeature as error:
        _warn_of_torch(error)
        return None
    return build(dtype)


def _recurrence(model: ModelConfig, num_threads: int) -> Recurrence:
    library = load_delta_net_library() if any(model.recurrent) else None
    return torch_recurrence if library is None else NativeRecurrence(library, num_threads)


def _as_it_is(adapter: Adapter) -> Adapter:
    return adapter


def _warn_of_torch(reason: InvalidModel | str) -> None:
    logger.warning(
        "torch's operators compute the model, which are slower for small batches: %s", reason
    )


class Done:
    """`PendingTokens` of a step that is complete when `execute` returns."""

    def __init__(self, sampled: SampledTokens) -> None:
        self._sampled = sampled

    def wait(self) -> SampledTokens:
        return self._sampled
