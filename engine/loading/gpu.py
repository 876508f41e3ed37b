"""`load_on_gpu`: a `CudaExecutor` from a config: weights, slots of adapters, KV pool, graphs.

The KV pool gets what `--gpu-memory-utilization` leaves after the weights, the slots, the largest
step's activations (measured by running one) and what other processes use. The log lists where the
memory went; an error names the flag to change, and its value.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

from penstock.engine.config import EngineConfig
from penstock.engine.executors.cuda.block_tier import GpuOffload
from penstock.engine.executors.cuda.chunk_steps import CHUNK_SIZES
from penstock.engine.executors.cuda.device import CudaGpu, Gpu
from penstock.engine.executors.cuda.device_tables import DeviceTables
from penstock.engine.executors.cuda.executor import CudaExecutor
from penstock.engine.executors.cuda.first_steps import OneForAll, largest_step, small_steps
from penstock.engine.executors.cuda.graphs import captured_sizes
from penstock.engine.executors.cuda.step_sampler import GRAPH_MODES
from penstock.engine.kernels.attention.backends import make_attention
from penstock.engine.loading.choices import choose_device, choose_dtype
from penstock.engine.loading.devices import measure_rates, out_of_memory_advice, size_gpu_pool
from penstock.engine.loading.ledger import Ledger
from penstock.engine.loading.place import Place
from penstock.engine.loading.steps import Loading
from penstock.engine.loading.weights import most_adapter_bytes
from penstock.engine.memory.gpu_budget import (
    MemoryBudget,
    check_adapters,
    check_weights,
    graph_bytes,
)
from penstock.engine.memory.machine import num_cores
from penstock.engine.memory.pool.kv_pool import KVPools, PoolSize
from penstock.engine.models.at_load.quantize import Quantized
from penstock.engine.models.decoder.fused import FusedModel, check_parts
from penstock.engine.models.decoder.gpu_formats import check_experts_on_gpu, kept_on_gpu
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.formats.kept import OnGpu
from penstock.engine.models.lora.slots import AdapterSlots
from penstock.engine.models.lora.store import Adapters
from penstock.engine.process.phases import Phases
from penstock.engine.ranks.torch_ranks import SOLE_DEVICE, SoleDevice, TorchRanks
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.types import BlockCopy, ScheduledBatch, StateSnapshot

_META, _CPU = torch.device("meta"), torch.device("cpu")
_BLOCK_SIZE = 64
# Reading is bound by the disk and by page faults, so more threads do not help.
_MAX_LOAD_THREADS = 16


def load_on_gpu(
    config: EngineConfig,
    model_dir: Path,
    gpu: Gpu | None = None,
    phases: Phases | None = None,
    ranks: TorchRanks | SoleDevice = SOLE_DEVICE,
) -> CudaExecutor:
    """Loads, measures, captures. ranks: that have a part of the model each. Raises InvalidConfig
    for what does not fit, or no such GPU."""
    gpu, phases = gpu or CudaGpu(choose_device(config.device)), phases or Phases()
    place = Place(ranks.layout, ranks.rank, ranks.tensor, ranks.everyone, least=ranks.least)
    with out_of_memory_advice(config, phases), _naming_limits(gpu):
        return _GpuLoading(config, model_dir, phases, place, gpu, _BLOCK_SIZE).load(ranks)


@contextmanager
def _naming_limits(gpu: Gpu) -> Iterator[None]:
    """Raises InvalidConfig where a kernel is too large for the GPU, mostly in float32."""
    try:
        yield
    except OutOfResources as error:
        raise InvalidConfig(
            f"{gpu.name} allows a kernel {error.limit} bytes of {error.name}, and with this "
            f"model's head size and type ours needs {error.required}; use --dtype bfloat16, or "
            "--attention-backend torch"
        ) from error


class _GpuLoading(Loading):
    @torch.inference_mode()
    def load(self, ranks: TorchRanks | SoleDevice) -> CudaExecutor:
        config, phases, gpu = self.config, self.phases, self.gpu
        self._ranks = ranks
        self._plan_all()
        most = config.scheduler.max_num_batched_tokens
        shape = max(most, *self._padded_sizes), self.model.hidden_size
        ranks.pipeline.allocate(*shape, self.dtype, gpu.device)
        self._check_memory(gpu.total_bytes - gpu.used_bytes())
        self._rates = measure_rates(gpu, self.dtype, phases)
        quantized = self.quantize(config.num_threads or num_cores(), self.kept)
        if quantized is not None:
            gpu.release()
        used_before = gpu.used_bytes()
        with self.reading():
            llama, self._slots = self._read(quantized), self._make_slots()
            self._quantization = None
            if quantized is not None:
                self._quantization = quantized.info
                del quantized  # the GPU has the codes now
                gpu.release()
            used = gpu.used_bytes()
        weights = max(0, used - used_before - self._slot_bytes)
        with phases.timed("activations", "compiling kernels, and running the largest step"):
            activations = self._measure_step(llama, used)
        with phases.timed("kv_pool", "allocating the pool of keys and values"):
            graphs = graph_bytes(self._num_graphs, activations)
            staging = None if self._offload is None else self._offload.staging_bytes
            reserved = activations + graphs + (staging or 0)
            budget = MemoryBudget(total=gpu.total_bytes, used=used, reserved=reserved)
            pools, longest = self.largest_pools, self.longest
            size = self.least(size_gpu_pool(config, pools, budget, longest, self._padding_bytes))
            adapters = None
            if self._slots is not None:
                adapters = self.adapters(self._slots.put, self._slots.free)
            executor = self._executor(llama, size, adapters, use_graphs=self._uses_graphs)
            used = gpu.used_bytes()
        graphs = self._capture(executor, used)
        pool = size.num_bytes(self.pools) + self._padding_bytes
        Ledger(
            total=gpu.total_bytes,
            others=max(0, used - weights - self._slot_bytes - pool),
            weights=weights,
            kv_pool=pool,
            adapters=self._slot_bytes or None,
            activations=activations,
            graphs=graphs,
            staging=staging,
        ).log(size, self.pools)
        return executor

    def _plan_all(self) -> None:
        """Plans what is to be in the GPU's memory, before any of it is."""
        config, model, gpu = self.config, self.model, self.gpu
        check_parts(self.whole)
        check_experts_on_gpu(self.whole, config.quantization)
        kept = kept_on_gpu(model, gpu.device)
        self.plan_weights(choose_dtype(config.dtype, gpu.device), kept, OnGpu(_META))
        self.num_weight_bytes += model.table_bytes(self.dtype.itemsize)
        self.plan_pool()
        identity = self.identity((gpu.name, config.attention_backend))
        self._offload = GpuOffload.of(config, self.pools, identity)
        # In each pool, a block for the padding rows of graphs.
        self._padding_bytes = sum(pool.block_bytes for pool in self.pools)
        self._grammar_table = self.grammars()
        self._slot_bytes = most_adapter_bytes(config.lora, model, self.dtype) or 0

    @property
    def _uses_graphs(self) -> bool:
        may = self._ranks.tensor is None or self._ranks.tensor.is_capturable
        return may and not self.config.enforce_eager

    @property
    def _padded_sizes(self) -> list[int]:
        """The numbers of tokens that steps are padded to."""
        return [*captured_sizes(self.config.scheduler.max_num_seqs), *CHUNK_SIZES]

    @property
    def _num_graphs(self) -> int:
        if not self._uses_graphs:
            return 0
        num_sizes = len(captured_sizes(self.config.scheduler.max_num_seqs))
        num_kinds = 1 if self.config.lora is None else 2  # of steps without adapters, and with
        samples = self.place.group is None and self.place.is_first
        num_modes = len(GRAPH_MODES) if samples else 1
        return num_kinds * (num_sizes * num_modes + len(CHUNK_SIZES))

    def _check_memory(self, free: int) -> None:
        dtype, name = str(self.dtype).removeprefix("torch."), self.gpu.name
        check_weights(name, self.gpu.total_bytes, free, self.num_weight_bytes, dtype)
        if (lora := self.config.lora) is not None:
            check_adapters(lora, name, self._slot_bytes, free - self.num_weight_bytes)

    def _read(self, quantized: Quantized | None) -> LlamaModel:
        return self.read_weights(
            quantized,
            self.config.num_threads or min(_MAX_LOAD_THREADS, num_cores()),
            partial(torch.empty, dtype=self.dtype, device=self.gpu.device),
            self.longest,
            maps_tables=False,  # in a file, the kernels could not read it
        )

    def _make_slots(self) -> AdapterSlots | None:
        if (lora := self.config.lora) is None:
            return None
        sizes = lora.max_loras, lora.max_rank
        return AdapterSlots(self.model, *sizes, self.dtype, self.gpu.device)

    def _measure_step(self, llama: LlamaModel, used: int) -> int:
        """The bytes that the largest step needs besides weights and pool.

        Runs one, with all its keys and values in a pool of one block; and before it small ones, so
        that no kernel has to be compiled while requests wait.
        """
        none = (0,) * (len(self.pools) - 1)
        size = PoolSize(num_blocks=0, max_model_len=self.longest, more_blocks=none)
        self._run_steps(llama, size, None)
        if self._slots is not None:
            seqs = self.config.scheduler.max_num_seqs
            self._run_steps(llama, size, OneForAll(None, None, self.dtype, _CPU, seqs))
        # Torch frees nothing by itself, so this is the peak, including the kernels' code.
        peak = self.gpu.used_bytes()
        gc.collect()
        self.gpu.release()
        return max(0, peak - used)

    def _run_steps(self, llama: LlamaModel, size: PoolSize, adapters: Adapters | None) -> None:
        executor = self._executor(llama, size, adapters, use_graphs=False)
        limits = self.config.scheduler, self.longest, self.block_size, len(self.pools)
        if self.gpu.device.type == "cuda" and self.longest > 1:
            for batch in small_steps(*limits):
                executor.execute(self._with_states(batch)).wait()
        executor.execute(self._with_states(largest_step(*limits))).wait()

    def _with_states(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Copies of states besides, where there are any, so that their kernels are compiled."""
        if self.layout.state is None:
            return batch
        copy = BlockCopy(0, 0, group=len(self.pools) - 1)
        snapshot = StateSnapshot(0, 1, 0)
        return batch._replace(copies=(*batch.copies, copy), snapshots=(snapshot,))

    def _executor(
        self,
        llama: LlamaModel,
        size: PoolSize,
        adapters: Adapters | None = None,
        *,
        use_graphs: bool,
    ) -> CudaExecutor:
        scheduler, device = self.config.scheduler, self.gpu.device
        block_size = self.block_size
        padded = [num_blocks + 1 for num_blocks in size.by_group]
        shape = self.model.kv_shape
        pool = KVPools(shape, self.layout, padded, block_size, self.kv_type, device)
        attention = make_attention(
            self.config,
            self.model.attention_windows(block_size),
            dtype=self.dtype,
            device=device,
            max_rows=scheduler.max_num_seqs,
            max_tokens=scheduler.max_num_batched_tokens,
            has_sinks=any(attention.has_sinks for attention in self.model.attentions),
        )
        tables = DeviceTables(
            scheduler.max_num_seqs, size.max_model_len, block_size, size.by_group, device
        )
        return CudaExecutor(
            FusedModel(
                llama, pool, attention, scheduler.max_num_seqs, self._slots, self._ranks.pipeline
            ),
            pool,
            tables,
            self._grammar_table,
            self.described(llama, size, self._rates, self._quantization),
            max_num_seqs=scheduler.max_num_seqs,
            adapters=adapters,
            use_graphs=use_graphs,
            ranks=self._ranks,
        )

    def _capture(self, executor: CudaExecutor, used: int) -> int:
        """Captures the graphs, and then takes the host's memory for blocks: how many bytes of the
        GPU's the graphs took. used: before."""
        gpu, phases = self.gpu, self.phases
        capturing = f"capturing {self._num_graphs} CUDA graphs"
        with phases.timed("graphs", capturing, total=self._num_graphs, unit="graphs"):
            executor.capture(phases.advance)
            gpu.release()
        graphs = max(0, gpu.used_bytes() - used)
        if self._offload is not None:
            with phases.timed("kv_offload", "taking memory of the host for blocks"):
                executor.tier = self._offload.tier(executor.pool, gpu)
        return graphs
