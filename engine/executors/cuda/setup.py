"""Builds a `CudaExecutor` from a config: weights, slots of adapters, KV pool, graphs.

The KV pool gets what `--gpu-memory-utilization` leaves after the weights, the slots, the largest
step's activations (measured by running one) and what other processes use. The log lists where the
memory went; an error names the flag to change, and its value.
"""

import gc
import logging
from functools import partial
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

from penstock.engine.config import EngineConfig
from penstock.engine.executors.cuda.block_tier import GpuOffload
from penstock.engine.executors.cuda.chunk_graphs import CHUNK_SIZES
from penstock.engine.executors.cuda.device import CudaGpu, Gpu
from penstock.engine.executors.cuda.device_tables import DeviceTables
from penstock.engine.executors.cuda.executor import CudaExecutor
from penstock.engine.executors.cuda.first_steps import OneForAll, largest_step, small_steps
from penstock.engine.executors.cuda.graphs import captured_sizes
from penstock.engine.executors.cuda.step_sampler import GRAPH_MODES
from penstock.engine.kernels.attention.backends import make_attention
from penstock.engine.kernels.attention.gathered import gathered_attention
from penstock.engine.loading.start import (
    Ledger,
    check_dtype,
    check_quantization,
    choose_device,
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
from penstock.engine.memory.dtypes import kv_dtype
from penstock.engine.memory.gpu_budget import (
    MemoryBudget,
    check_adapters,
    check_weights,
    graph_bytes,
    out_of_memory,
    pool_advice,
    pool_bytes,
)
from penstock.engine.memory.machine import num_cores
from penstock.engine.memory.pool.kept import identity_of
from penstock.engine.memory.pool.kv_pool import (
    KVPools,
    PoolSize,
    resolve_max_model_len,
    size_pool,
)
from penstock.engine.memory.tiers.offload import refuse_with_states
from penstock.engine.models.at_load.plan import Plan
from penstock.engine.models.at_load.quantize import (
    Quantized,
    quantization_plan,
    quantize,
)
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.fused import FusedModel, check_parts
from penstock.engine.models.decoder.gpu_formats import check_experts_on_gpu, kept_on_gpu
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.division.stage import Stage
from penstock.engine.models.layers.coded import OnGpu
from penstock.engine.models.layers.linear import PlainLinear
from penstock.engine.models.lora.slots import AdapterSlots
from penstock.engine.models.lora.store import Adapters
from penstock.engine.models.lora.weights import RankPart
from penstock.engine.process.phases import Phases
from penstock.engine.ranks.torch_ranks import TorchRanks
from penstock.engine.sampling.grammar import Grammars
from penstock.engine.sampling.grammar_table import GrammarTable
from penstock.engine.step.model_info import ModelInfo, QuantizationInfo
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.types import (
    BlockCopy,
    ScheduledBatch,
    StateSnapshot,
)

logger = logging.getLogger(__name__)

_META, _CPU = torch.device("meta"), torch.device("cpu")
_DEFAULT_BLOCK_SIZE = 64
# The scheduler's lists of them cost the host some 50 bytes each; no useful model needs more.
_MAX_BLOCKS = 2**20
# Reading is bound by the disk and by page faults, so more threads do not help.
_MAX_LOAD_THREADS = 16


def build_cuda_executor(
    config: EngineConfig,
    model_dir: Path,
    gpu: Gpu | None = None,
    phases: Phases | None = None,
    ranks: TorchRanks | None = None,
) -> CudaExecutor:
    """Loads, measures, captures. ranks: that have a part of the model each. Raises InvalidConfig
    for what does not fit, or no such GPU."""
    gpu = gpu or CudaGpu(choose_device(config.device))
    phases = phases or Phases()
    check_quantization(config, model_dir)
    try:
        return _Setup(config, model_dir, gpu, phases, ranks).build()
    except RuntimeError as error:
        # torch.OutOfMemoryError, or the driver's error where torch did not allocate.
        if "out of memory" not in str(error).lower():
            raise
        logger.exception("the GPU's memory ran out")
        raise InvalidConfig(out_of_memory(config, phases.current)) from error
    except OutOfResources as error:  # large heads on a small GPU, mostly in float32
        raise InvalidConfig(
            f"{gpu.name} allows a kernel {error.limit} bytes of {error.name}, and with this "
            f"model's head size and type ours needs {error.required}; use --dtype bfloat16, or "
            "--attention-backend torch"
        ) from error


class _Setup:
    """The state that the steps of the setup share."""

    def __init__(
        self,
        config: EngineConfig,
        model_dir: Path,
        gpu: Gpu,
        phases: Phases,
        ranks: TorchRanks | None,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._group = group = None if ranks is None else ranks.tensor
        self._pipeline = None if ranks is None else ranks.pipeline
        self._model_dir = model_dir
        self._gpu = gpu
        self._phases = phases
        self._whole = self._model = ModelConfig.from_dir(model_dir)
        check_dtype(config.dtype, self._model)
        check_parts(self._model)
        if any(self._model.recurrent):
            refuse_with_states(config)
        check_experts_on_gpu(self._model, config.quantization)
        self._shard: Shard | None = None
        if group is not None:
            self._shard = Shard(self._whole, group.rank, group.size)
            self._model = self._shard.config
        of_all_layers = self._model
        self._stage: Stage | None = None
        if (pipeline := self._pipeline) is not None:
            self._stage = Stage(of_all_layers, pipeline.stage, pipeline.num_stages)
            self._model = self._stage.config
        self._dtype = choose_dtype(config.dtype, gpu.device)
        self._kept = kept_on_gpu(self._model, gpu.device)
        log_text_only(config, self._model)
        log_widening(self._model, self._dtype, self._kept)
        self._plan = quantization_plan(
            config.quantization, self._model, self._dtype, OnGpu(_META), self._stage
        )
        self._quantized: Quantized | None = None
        self._quantization: QuantizationInfo | None = None
        self._weight_bytes = weight_bytes(
            self._model,
            config.load_format,
            model_dir,
            self._dtype,
            kept=self._kept,
            plan=self._plan,
            stage=self._stage,
        ) + self._model.table_bytes(self._dtype.itemsize)
        self._block_size = config.block_size or _DEFAULT_BLOCK_SIZE
        self._kv_dtype = kv_dtype(config.kv_cache_dtype, self._dtype)
        self._max_len = resolve_max_model_len(config.max_model_len, self._model.max_model_len)
        self._layout = layout = of_all_layers.kv_layout(self._max_len)
        sizes = self._block_size, self._kv_dtype.itemsize
        if self._stage is not None:
            self._layout = self._stage.layout(layout)
        self._pools = self._layout.pools(self._model.kv_shape, *sizes)
        # That the number of blocks is computed from: of the stage where a block takes most.
        self._largest_pools = self._pools
        if self._stage is not None:
            self._largest_pools = self._stage.pools(layout, *sizes)
        # What decides the bytes of a block of the same tokens.
        formats = (self._dtype, self._kv_dtype, config.load_format, config.quantization)
        attention = (gpu.name, config.attention_backend)
        identity = identity_of(
            model_dir, self._model, formats, self._block_size, attention, self._layout
        )
        self._offload = GpuOffload.of(config, self._pools, identity)
        # In each pool, a block for the padding rows of graphs.
        self._padding_bytes = sum(pool.block_bytes for pool in self._pools)
        self._bandwidth: float | None = None
        self._flops: float | None = None
        vocab_size = self._whole.vocab_size
        grammars = Grammars.of_model(
            model_dir, vocab_size, self._model.eos_token_ids, config.load_format
        )
        if ranks is None or ranks.rank == 0:
            grammars.load_tokenizer()
        self._grammars = GrammarTable(grammars, config.scheduler.max_num_seqs, vocab_size)
        self._slots: AdapterSlots | None = None
        self._slot_bytes = most_adapter_bytes(config.lora, self._model, self._dtype) or 0

    @torch.inference_mode()
    def build(self) -> CudaExecutor:
        gpu, phases = self._gpu, self._phases
        if self._pipeline is not None:
            most = self._config.scheduler.max_num_batched_tokens
            shape = max(most, *self._padded_sizes), self._model.hidden_size
            self._pipeline.allocate(*shape, self._dtype, gpu.device)
        self._check_memory(gpu.total_bytes - gpu.used_bytes())
        with phases.timed("bandwidth", "measuring how fast memory is copied"):
            self._bandwidth = gpu.copy_bandwidth()
        with phases.timed("flops", "measuring how fast matrices are multiplied"):
            self._flops = gpu.matmul_flops(self._dtype)
        if self._plan is not None:
            self._quantized = self._quantize(self._plan)
            gpu.release()
        used_before = gpu.used_bytes()
        what = reading(self._weight_bytes, self._dtype)
        with phases.timed("weights", what, total=self._weight_bytes):
            llama = self._load()
            if self._quantized is not None:
                self._quantization = self._quantized.info
                self._quantized = None  # the GPU has the codes now
                gpu.release()
            if (lora := self._config.lora) is not None:
                self._slots = AdapterSlots(
                    self._model, lora.max_loras, lora.max_rank, self._dtype, gpu.device
                )
            used = gpu.used_bytes()
        weights = max(0, used - used_before - self._slot_bytes)
        with phases.timed("activations", "compiling kernels, and running the largest step"):
            activations = self._measure_step(llama, used)
        with phases.timed("kv_pool", "allocating the pool of keys and values"):
            graphs = graph_bytes(self._num_graphs, activations)
            staging = None if self._offload is None else self._offload.staging_bytes
            reserved = activations + graphs + (staging or 0)
            budget = MemoryBudget(total=gpu.total_bytes, used=used, reserved=reserved)
            size = self._size_pool(budget)
            executor = self._executor(llama, size, self._adapters(), use_graphs=self._uses_graphs)
            used = gpu.used_bytes()
        capturing = f"capturing {self._num_graphs} CUDA graphs"
        with phases.timed("graphs", capturing, total=self._num_graphs, unit="graphs"):
            executor.capture(phases.advance)
            gpu.release()
        graphs = max(0, gpu.used_bytes() - used)
        if self._offload is not None:
            with phases.timed("kv_offload", "taking memory of the host for blocks"):
                executor.tier = self._offload.tier(executor.pool, gpu)
        pool = size.num_bytes(self._pools) + self._padding_bytes
        Ledger(
            total=gpu.total_bytes,
            others=max(0, used - weights - self._slot_bytes - pool),
            weights=weights,
            kv_pool=pool,
            adapters=self._slot_bytes or None,
            activations=activations,
            graphs=graphs,
            staging=staging,
        ).log(size, self._pools)
        return executor

    @property
    def _uses_graphs(self) -> bool:
        may = self._group is None or self._group.is_capturable
        return may and not self._config.enforce_eager

    @property
    def _padded_sizes(self) -> list[int]:
        """Of steps: numbers of tokens."""
        return [*captured_sizes(self._config.scheduler.max_num_seqs), *CHUNK_SIZES]

    @property
    def _num_graphs(self) -> int:
        if not self._uses_graphs:
            return 0
        num_sizes = len(captured_sizes(self._config.scheduler.max_num_seqs))
        num_kinds = 1 if self._config.lora is None else 2  # of steps without adapters, and with
        samples = self._group is None and (self._ranks is None or self._ranks.rank == 0)
        num_modes = len(GRAPH_MODES) if samples else 1
        return num_kinds * (num_sizes * num_modes + len(CHUNK_SIZES))

    def _check_memory(self, free: int) -> None:
        dtype, name = str(self._dtype).removeprefix("torch."), self._gpu.name
        check_weights(name, self._gpu.total_bytes, free, self._weight_bytes, dtype)
        if (lora := self._config.lora) is not None:
            check_adapters(lora, name, self._slot_bytes, free - self._weight_bytes)

    def _quantize(self, plan: Plan) -> Quantized:
        """Rounds on the GPU. The codes wait in this machine's memory until they are loaded."""
        num_threads = self._config.num_threads or num_cores()
        return quantize(
            self._config,
            self._model_dir,
            plan,
            self._phases,
            num_threads,
            self._gpu.device,
            self._kept,
            self._shard,
            self._stage,
        )

    def _load(self) -> LlamaModel:
        """Each weight is read once, by one of several threads, to where it stays."""
        torch.set_num_threads(1)  # the threads that read are Python's
        empty = partial(torch.empty, dtype=self._dtype, device=self._gpu.device)
        config, stage = self._config, self._stage
        source = weight_source(
            config.load_format,
            self._model_dir,
            self._model,
            empty,
            self._phases,
            self._quantized,
            make_linear=PlainLinear,
            kept=self._kept,
            shard=self._shard,
        )
        return LlamaModel(
            self._model,
            source if stage is None else stage.of(source),
            PlainLinear,
            gathered_attention,
            max_model_len=self._max_len,
            device=self._gpu.device,
            num_load_threads=config.num_threads or min(_MAX_LOAD_THREADS, num_cores()),
            maps_tables=False,  # in a file, the kernels could not read it
            shard=self._shard,
            group=self._group,
            stage=stage,
            dtype=self._dtype,
        )

    def _measure_step(self, llama: LlamaModel, used: int) -> int:
        """The bytes that the largest step needs besides weights and pool.

        Runs one, with all its keys and values in a pool of one block; and before it small ones, so
        that no kernel has to be compiled while requests wait.
        """
        none = (0,) * (len(self._pools) - 1)
        size = PoolSize(num_blocks=0, max_model_len=self._max_len, more_blocks=none)
        self._run_steps(llama, size, None)
        if self._slots is not None:
            seqs = self._config.scheduler.max_num_seqs
            self._run_steps(llama, size, OneForAll(None, None, self._dtype, _CPU, seqs))
        # Torch frees nothing by itself, so this is the peak, including the kernels' code.
        peak = self._gpu.used_bytes()
        gc.collect()
        self._gpu.release()
        return max(0, peak - used)

    def _run_steps(self, llama: LlamaModel, size: PoolSize, adapters: Adapters | None) -> None:
        executor = self._executor(llama, size, adapters, use_graphs=False)
        limits = self._config.scheduler, self._max_len, self._block_size, len(self._pools)
        if self._gpu.device.type == "cuda" and self._max_len > 1:
            for batch in small_steps(*limits):
                executor.execute(self._with_states(batch)).wait()
        executor.execute(self._with_states(largest_step(*limits))).wait()

    def _with_states(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Copies of states besides, where there are any, so that their kernels are compiled."""
        if self._layout.state is None:
            return batch
        copy = BlockCopy(0, 0, group=len(self._pools) - 1)
        snapshot = StateSnapshot(0, 1, 0)
        return batch._replace(copies=(*batch.copies, copy), snapshots=(snapshot,))

    def _size_pool(self, budget: MemoryBudget) -> PoolSize:
        config = self._config
        size = size_pool(
            self._largest_pools,
            config.scheduler,
            budget=pool_bytes(config, budget) - self._padding_bytes,
            max_blocks=_MAX_BLOCKS,
            max_len=self._max_len,
            may_shorten=config.max_model_len is None,
            advice=lambda needed: pool_advice(config, budget)(needed + self._padding_bytes),
        )
        if self._ranks is None:
            return size
        num_blocks, *more, max_len = self._ranks.least([*size.of_groups, size.max_model_len])
        return PoolSize(num_blocks=num_blocks, max_model_len=max_len, more_blocks=tuple(more))

    def _adapters(self) -> Adapters | None:
        """None where there are no slots for any."""
        if (slots := self._slots) is None:
            return None
        max_num_seqs = self._config.scheduler.max_num_seqs
        return Adapters(
            self._config.lora,
            self._model,
            self._dtype,
            _CPU,
            max_num_seqs,
            make=slots.put,
            drop=slots.free,
            part=RankPart(
                whole=self._whole,
                shard=self._shard,
                first_layer=0 if self._stage is None else self._stage.layers.start,
            ),
        )

    def _executor(
        self,
        llama: LlamaModel,
        size: PoolSize,
        adapters: Adapters | None = None,
        *,
        use_graphs: bool,
    ) -> CudaExecutor:
        scheduler, device = self._config.scheduler, self._gpu.device
        block_size = self._block_size
        padded = [num_blocks + 1 for num_blocks in size.of_groups]
        shape = self._model.kv_shape
        pool = KVPools(shape, self._layout, padded, block_size, self._kv_dtype, device)
        attention = make_attention(
            self._config,
            self._model.attention_windows(block_size),
            dtype=self._dtype,
            device=device,
            max_rows=scheduler.max_num_seqs,
            max_tokens=scheduler.max_num_batched_tokens,
            has_sinks=any(attention.has_sinks for attention in self._model.attentions),
        )
        tables = DeviceTables(
            scheduler.max_num_seqs, size.max_model_len, block_size, size.of_groups, device
        )
        return CudaExecutor(
            FusedModel(llama, pool, attention, scheduler.max_num_seqs, self._slots, self._pipeline),
            pool,
            tables,
            self._grammars,
            self._describe(llama, size),
            max_num_seqs=scheduler.max_num_seqs,
            adapters=adapters,
            use_graphs=use_graphs,
            ranks=self._ranks,
        )

    def _describe(self, llama: LlamaModel, size: PoolSize) -> ModelInfo:
        info = describe(
            self._model,
            self._dtype,
            self._gpu.name,
            size,
            self._block_size,
            self._bandwidth,
            self._phases.seconds,
            self._flops,
            weight_bytes=llama.step_weight_bytes,
            expert_bytes=llama.expert_bytes,
            kv_dtype=self._kv_dtype,
            quantization=self._quantization,
            layout=self._layout,
        )
        if self._ranks is None:
            return info
        sizes = self._ranks.layout
        return of_ranks(
            info, self._whole, tensor_size=sizes.tensor_size, num_stages=sizes.num_stages
        )
