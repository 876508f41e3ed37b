"""`GpuLoading`: a model in a GPU's memory: weights, slots of adapters, KV pool.

The KV pool gets what `--gpu-memory-utilization` leaves after the weights, the slots, the largest
step's activations (measured by running one) and what other processes use. The log lists where the
memory went; an error names the flag to change, and its value.
"""

import gc
from functools import partial
from typing import Any

import torch

from penstock.engine.config import GpuWay
from penstock.engine.executors.cuda.block_tier import GpuOffload
from penstock.engine.executors.cuda.chunk_steps import chunk_sizes
from penstock.engine.executors.cuda.device_tables import DeviceTables
from penstock.engine.executors.cuda.executor import CudaExecutor, DeviceModel
from penstock.engine.executors.cuda.first_steps import OneForAll, largest_step, small_steps
from penstock.engine.executors.cuda.graphs import captured_sizes, drafted_sizes
from penstock.engine.executors.cuda.step_sampler import GRAPH_MODES
from penstock.engine.executors.loaded_model import LoadedModel
from penstock.engine.kernels.attention.backends import make_attention, takes_drafts
from penstock.engine.kernels.attention.flash_prefill import FlashPrefill
from penstock.engine.kernels.launch import device_overlaps, set_overlap
from penstock.engine.loading.description import dtype_name
from penstock.engine.loading.devices import (
    check_rounding_on_gpu,
    choose_dtype,
    kept_on_gpu,
    measure_rates,
    size_gpu_pool,
)
from penstock.engine.loading.prefill import flash_prefill
from penstock.engine.loading.self_check import (
    COMPILE_S,
    DEVICE_S,
    check,
    checked_size,
    failures,
    first_layers,
    run_step,
)
from penstock.engine.loading.steps import DecoderLoading
from penstock.engine.loading.weights import most_adapter_bytes
from penstock.engine.memory.gpu_budget import (
    MemoryBudget,
    check_adapters,
    check_weights,
    graph_bytes,
)
from penstock.engine.memory.ledger import Ledger, pool_notes
from penstock.engine.memory.machine import num_cores
from penstock.engine.memory.pool.kv_pool import KVPools, PoolSize
from penstock.engine.models.at_load.quantize import Quantized
from penstock.engine.models.decoder.fused import FusedModel, check_parts
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.formats.kept import OnGpu
from penstock.engine.models.lora.slots import AdapterSlots
from penstock.engine.models.lora.store import Adapters, no_adapters
from penstock.engine.process.phases import Phases
from penstock.engine.ranks.torch_ranks import SOLE_DEVICE, SoleDevice, TorchRanks
from penstock.engine.step.device_step import DraftSizes
from penstock.engine.step.model_info import ModelInfo
from penstock.scheduler.types import BlockCopy, ScheduledBatch, StateSnapshot

_META, _CPU = torch.device("meta"), torch.device("cpu")
# Reading is bound by the disk and by page faults, so more threads do not help.
_MAX_LOAD_THREADS = 16


class GpuLoading(DecoderLoading):
    place: TorchRanks | SoleDevice
    default_block_size = 64
    flash: FlashPrefill | None = None

    def alone(self) -> SoleDevice:
        return SOLE_DEVICE

    def plan(self) -> None:
        config, model, gpu = self.config, self.model, self.device
        self.way = self._choose_way()
        set_overlap(False if device_overlaps() and self.way is not GpuWay.PDL else None)
        check_parts(self.whole)
        check_rounding_on_gpu(self.whole, config.quantization)
        kept = kept_on_gpu(model, gpu.device)
        self.plan_weights(choose_dtype(config.dtype, gpu.device), kept, OnGpu(_META))
        num_weight_bytes = (self.num_weight_bytes or 0) + model.table_bytes(self.dtype.itemsize)
        self.num_weight_bytes = num_weight_bytes
        self.plan_pool()
        identity = self.identity((gpu.name, config.attention_backend))
        self._offload = GpuOffload.of(config, self.pools, identity)
        # In each pool, a block for the padding rows of graphs.
        self._padding_bytes = sum(pool.block_bytes for pool in self.pools)
        self._grammar_table = self.grammars()
        self._slot_bytes = most_adapter_bytes(config.lora, model, self.dtype) or 0
        # Steps are padded to so many tokens, by all ranks alike.
        self._chunk_sizes = self._choose_chunk_sizes()
        self._drafted = self._choose_drafted()
        sizes = *captured_sizes(config.scheduler.max_num_seqs), *self._chunk_sizes
        most = max(config.scheduler.max_step_tokens, *sizes)
        self.place.pipeline.allocate(most, model.hidden_size, self.dtype, gpu.device)
        total, free = gpu.total_bytes, gpu.total_bytes - gpu.used_bytes()
        check_weights(gpu.name, total, free, num_weight_bytes, dtype_name(self.dtype))
        if config.lora is not None:
            check_adapters(config.lora, gpu.name, self._slot_bytes, free - num_weight_bytes)
        self._rates = measure_rates(gpu, self.dtype, self.phases)

    def _choose_way(self) -> GpuWay:
        """The fastest that this device has of those that may be used."""
        absent = set() if device_overlaps() else {GpuWay.PDL}
        if not self._may_capture:
            absent.add(GpuWay.GRAPHS)
        return next(way for way in self.config.gpu_way.or_slower if way not in absent)

    def _choose_chunk_sizes(self) -> tuple[int, ...]:
        if self.device.device.type == "cpu":
            return ()  # there padding only costs
        most, ranks = self.config.scheduler.max_step_tokens, self.place.layout.tensor_size
        sizes = chunk_sizes(self.whole, ranks, self.device.name, self.dtype, most)
        return sizes[: self.place.least([len(sizes)])[0]]

    def _choose_drafted(self) -> DraftSizes | None:
        """None where decodes may not have drafts, or need not."""
        wanted, is_alone = self.config.speculative, self.place.layout.size == 1
        if wanted is None or not wanted.num_speculative_tokens:
            return None
        if not (is_alone and self.layout.state is None and takes_drafts(self.config)):
            return None
        return drafted_sizes(self.config.scheduler.max_num_seqs, wanted.num_speculative_tokens)

    @property
    def _may_capture(self) -> bool:
        return self.place.tensor.is_capturable and not self.config.enforce_eager

    @property
    def _uses_graphs(self) -> bool:
        return self._may_capture and self.way in (GpuWay.PDL, GpuWay.GRAPHS)

    @property
    def _num_graphs(self) -> int:
        if not self._uses_graphs:
            return 0
        num_sizes = len(captured_sizes(self.config.scheduler.max_num_seqs))
        num_kinds = 1 if self.config.lora is None else 2  # of steps without adapters, and with
        samples = self.place.tensor.size == 1 and self.place.rank == 0
        num_modes = len(GRAPH_MODES) if samples else 1
        if self._drafted is not None:
            num_sizes += len(self._drafted.tokens)
        return num_kinds * (num_sizes * num_modes + len(self._chunk_sizes))

    @property
    def num_threads(self) -> int:
        return self.config.num_threads or num_cores()

    def quantize(self) -> Quantized | None:
        quantized = super().quantize()
        if quantized is not None:
            self.device.release()
        self._used_before = self.device.used_bytes()
        return quantized

    def read(self, quantized: Quantized | None) -> None:
        self.read_weights(
            quantized,
            self.config.num_threads or min(_MAX_LOAD_THREADS, num_cores()),
            partial(torch.empty, dtype=self.dtype, device=self.device.device),
            self.longest,
            maps_tables=False,  # in a file, the kernels could not read it
        )
        self._slots: AdapterSlots | None = None
        if (lora := self.config.lora) is not None:
            sizes = lora.max_loras, lora.max_rank
            self._slots = AdapterSlots(self.model, *sizes, self.dtype, self.device.device)

    def measure_step(self) -> int:
        """The bytes that the largest step needs besides weights and pool.

        Runs one, with all its keys and values in a pool of one block; and before it small ones, so
        that no kernel has to be compiled while requests wait.
        """
        what = "compiling kernels, running the largest step, and checking the GPU"
        with self.phases.timed("activations", what), failures(self.way):
            self.choose_prefill()
            self._run_steps(None)
            if self._slots is not None:
                seqs = self.config.scheduler.max_num_seqs
                self._run_steps(OneForAll(None, None, self.dtype, _CPU, seqs))
            # Torch frees nothing by itself, so this is the peak, including the kernels' code.
            peak = self.device.used_bytes()
            self._release()
            if self.device.compiles_kernels and self.place.layout.size == 1:
                self.check()
                self._release()
            return max(0, peak - self.used)

    def _release(self) -> None:
        gc.collect()
        self.device.release()

    def choose_prefill(self) -> None:
        of_model = self.model, self.block_size, {self.dtype, self.kv_type}
        self.flash = flash_prefill(self.config, self.device, *of_model)
        self._release()

    def check(self) -> None:
        """Raises GpuWayFailed."""
        part, groups = first_layers(self.llama), len(self.pools)
        size = checked_size(self.block_size, groups, self.longest)
        # Graphs, which have prompts as short as the check's, have no chunks of FlashAttention's.
        for use_graphs in {self._uses_graphs, self._uses_graphs and self.flash is None}:
            loaded = self._model_with(size, None, use_graphs=use_graphs, part=part)
            check(CudaExecutor(loaded), part, self.way, self.config.scheduler)

    def _run_steps(self, adapters: Adapters | None) -> None:
        num_groups = len(self.pools)
        size = PoolSize(0, self.longest, (0,) * (num_groups - 1))
        executor = CudaExecutor(self._model_with(size, adapters, use_graphs=False))
        limits = self.config.scheduler, self.longest, self.block_size, num_groups
        # Other ranks compile for as long.
        most_s = DEVICE_S if self.place.layout.size == 1 else COMPILE_S
        if self.device.compiles_kernels and self.longest > 1:
            for batch in small_steps(*limits, self._drafted):
                run_step(executor, self._with_states(batch), most_s=most_s)
        run_step(executor, self._with_states(largest_step(*limits)), most_s=COMPILE_S)

    def _with_states(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Copies of states besides, where there are any, so that their kernels are compiled."""
        if self.layout.state is None:
            return batch
        copy = BlockCopy(0, 0, group=len(self.pools) - 1)
        snapshot = StateSnapshot(0, 1, 0)
        return batch._replace(copies=(*batch.copies, copy), snapshots=(snapshot,))

    def size_pool(self) -> PoolSize:
        activations = self.activations or 0
        reserved = activations + graph_bytes(self._num_graphs, activations)
        if self._offload is not None:
            reserved += self._offload.staging_bytes
        budget = MemoryBudget(total=self.device.total_bytes, used=self.used, reserved=reserved)
        sizes = self.longest, self._padding_bytes
        return self.least(size_gpu_pool(self.config, self.largest_pools, budget, *sizes))

    def complete(self, size: PoolSize) -> LoadedModel:
        slots, adapters = self._slots, None
        if slots is not None:
            adapters = self.adapters(make=slots.put, drop=slots.free)
        loaded = self._model_with(size, adapters, use_graphs=self._uses_graphs)
        loaded.offload, loaded.num_graphs = self._offload, self._num_graphs
        loaded.ledger = self.ledger(size)
        return loaded

    def ledger(self, size: PoolSize) -> Ledger:
        return Ledger(
            total=self.device.total_bytes,
            weights=max(0, self.used - self._used_before - self._slot_bytes),
            kv_pool=size.num_bytes(self.pools) + self._padding_bytes,
            adapters=self._slot_bytes or None,
            activations=self.activations,
            staging=None if self._offload is None else self._offload.staging_bytes,
            pool_notes=pool_notes(size, self.pools),
        )

    def info(self, size: PoolSize, **more: Any) -> ModelInfo:
        return self.described(size, gpu_way=self.way, **self._rates, **more)

    def _model_with(
        self,
        size: PoolSize,
        adapters: Adapters | None,
        *,
        use_graphs: bool,
        part: LlamaModel | None = None,
    ) -> DeviceModel:
        """part: of the layers, where it has not all of them."""
        scheduler, device, block_size = self.config.scheduler, self.device.device, self.block_size
        seqs = scheduler.max_num_seqs
        padded = [num_blocks + 1 for num_blocks in size.by_group]
        llama, layout = self.llama, self.layout
        if part is not None:
            llama, layout = part, part.config.kv_layout(self.longest)
        pool = KVPools(llama.config.kv_shape, layout, padded, block_size, self.kv_type, device)
        attention = make_attention(
            self.config,
            self.model.attention_windows(block_size),
            dtype=self.dtype,
            device=device,
            max_rows=seqs,
            max_tokens=scheduler.max_step_tokens,
            has_sinks=any(attention.has_sinks for attention in self.model.attentions),
            flash=self.flash,
            drafted=self._drafted,
        )
        rows = max(seqs, self._drafted.most_tokens) if self._drafted else seqs
        fused = FusedModel(llama, pool, attention, rows, self._slots, self.place.pipeline)
        return DeviceModel(
            model=fused,
            pool=pool,
            tables=DeviceTables(seqs, size.max_model_len, block_size, size.by_group, device),
            grammars=self._grammar_table,
            info=self.info(size),
            max_num_seqs=seqs,
            adapters=adapters or no_adapters(seqs),
            use_graphs=use_graphs,
            chunk_sizes=self._chunk_sizes,
            ranks=self.place,
            device=self.device,
            drafted=self._drafted,
            pooled=self.pooled,
        )


def captured(loaded: LoadedModel, phases: Phases) -> CudaExecutor:
    """Makes the executor, captures its graphs, and then takes the host's memory for blocks."""
    assert isinstance(loaded, DeviceModel), loaded
    executor = CudaExecutor(loaded)
    gpu, ledger, num_graphs = loaded.device, loaded.ledger, loaded.num_graphs
    used = gpu.used_bytes()
    capturing = f"capturing {num_graphs} CUDA graphs"
    way = loaded.info.gpu_way or GpuWay.EAGER
    with phases.timed("graphs", capturing, total=num_graphs, unit="graphs"), failures(way):
        executor.capture(phases.advance)
        gpu.release()
    ledger.graphs = max(0, gpu.used_bytes() - used)
    ledger.others = max(0, used - ledger.weights - (ledger.adapters or 0) - ledger.kv_pool)
    if loaded.offload is not None:
        with phases.timed("kv_offload", "taking memory of the host for blocks"):
            executor.tier = loaded.offload.tier(executor.pool, gpu)
    ledger.log()
    return executor
