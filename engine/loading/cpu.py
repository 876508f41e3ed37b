"""`load_on_cpu`: a model in the memory of a processor, from its configuration to what computes it.

Of several ranks each does so with its own part, and they wait for each other where one needs what
another has done.
"""

import logging
from collections.abc import Callable
from ctypes import CDLL
from functools import partial
from pathlib import Path

import torch

from penstock.engine.config import AttentionBackend, Dtype, EngineConfig, KVCacheDtype
from penstock.engine.executors.cuda.device import Processor
from penstock.engine.executors.loaded_model import LoadedModel
from penstock.engine.files.gguf.file import is_gguf
from penstock.engine.loading.choices import choose_dtype
from penstock.engine.loading.devices import measure_rates
from penstock.engine.loading.ledger import Ledger
from penstock.engine.loading.place import Place
from penstock.engine.loading.rank_pools import pool_memory, pools_of_others
from penstock.engine.loading.steps import Loading
from penstock.engine.loading.weights import most_adapter_bytes
from penstock.engine.memory.host import Arena
from penstock.engine.memory.machine import available_memory_bytes, num_cores
from penstock.engine.memory.pool.kv_memory import KVMemory
from penstock.engine.memory.pool.kv_pool import KVPools, PoolSize, size_cpu_pool
from penstock.engine.memory.tiers.block_files import BlockFiles
from penstock.engine.memory.tiers.disk_tier import DiskTier
from penstock.engine.memory.tiers.offload import block_files, disk_tier
from penstock.engine.memory.tiers.pool_bytes import PoolBytes, StepsInFlight
from penstock.engine.models.at_load.quantize import Quantized, quantization_plan
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.gathered import GatheredModel
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.errors import (
    InvalidModel,
    UnsupportedFeature,
    UnsupportedWeightFormat,
)
from penstock.engine.models.formats.kept import AsStored
from penstock.engine.models.gguf.weights import weight_formats as gguf_formats
from penstock.engine.models.layers.linear import cpu_linear
from penstock.engine.models.parts.delta_net.layer import Recurrence, torch_recurrence
from penstock.engine.native.features import check_features, may_code_kv
from penstock.engine.native.inputs import gather_input
from penstock.engine.native.library import load_delta_net_library, load_library
from penstock.engine.native.model import NativeModel
from penstock.engine.native.packing import FORMATS
from penstock.engine.native.parts.delta_net import NativeRecurrence
from penstock.engine.process.phases import Phases
from penstock.engine.step.model_info import ModelInfo
from penstock.scheduler.errors import InvalidConfig

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_BLOCK_SIZE = 16


def load_on_cpu(config: EngineConfig, model_dir: Path, phases: Phases, place: Place) -> LoadedModel:
    """Raises InvalidConfig and InvalidModel."""
    if config.attention_backend is not AttentionBackend.AUTO:
        raise InvalidConfig(
            f"--attention-backend {config.attention_backend} is for a GPU, and the model runs "
            "on the CPU, which has one implementation of attention; leave the flag out"
        )
    return _CpuLoading(config, model_dir, phases, place, Processor(), _BLOCK_SIZE).load()


class _CpuLoading(Loading):
    def load(self) -> LoadedModel:
        config, place, phases = self.config, self.place, self.phases
        # The server's process shares them: a thread that it interrupts holds up no other.
        self._num_threads = config.num_threads or max(1, num_cores() // place.layout.size)
        dtype = self._choose_library()
        self.plan_weights(dtype, AsStored(() if self._library is None else FORMATS))
        self.plan_pool()
        files, memory = self._files_and_memory()
        place.everyone.barrier()  # the memory that is free is divided before anybody takes some
        available = available_memory_bytes()
        size = self._size_pool(memory)
        quantized = self.quantize(self._num_threads)
        with self.reading():
            llama = self._read(quantized, size)
        with phases.timed("kv_pool", "allocating the pool of keys and values"):
            shape, sizes = self.model.kv_shape, (size.by_group, self.block_size)
            pool = KVPools(shape, self.layout, *sizes, self.kv_type, _CPU, memory)
            steps_in_flight = StepsInFlight()
            tier = self._tier(files, pool, size, steps_in_flight)
            native = self._native(llama, pool)
        products = "torch" if native is None else native.products
        loaded = LoadedModel(
            model=native or llama,
            pool=pool,
            info=self._info(llama, size, products, quantized),
            adapters=self.adapters(*(() if native is None else (native.packed_adapter,))),
            grammars=self.grammars(),
            max_num_seqs=config.scheduler.max_num_seqs,
            tier=tier,
            steps_in_flight=steps_in_flight,
            native=native,
            everyone=place.everyone,
            pipeline=place.pipeline,
        )
        if native is not None and self._library is not None:
            loaded.build_input, loaded.argmax = partial(gather_input, self._library), native.argmax
        if place.group:
            loaded.model = GatheredModel(loaded.model, place.group, self.whole.vocab_size)
        self._log_ledger(size, available)
        return loaded

    def _choose_library(self) -> torch.dtype:
        """The compiled step, where there is one, and the type of the weights."""
        place = self.place
        with self.phases.timed("compile", "loading the step that is compiled for this processor"):
            if not place.is_first:
                place.everyone.barrier()  # rank 0 compiles for all
            dtype, self._library = _dtype_and_library(self.config, self.divided, self.model_dir)
            if place.is_first:
                place.everyone.barrier()
        if self._library is None:
            self.make_linear = cpu_linear(dtype, has_experts=self.model.experts is not None)
        return dtype

    def _files_and_memory(self) -> tuple[BlockFiles | None, KVMemory | None]:
        """The files of blocks, and the memory that the pool is in, where these are given."""
        config, place = self.config, self.place
        identity = self.identity(self._library and Path(self._library._name).name)
        files = block_files(config, identity) if place.is_first else None
        memory = None
        if place.rank_pools:
            memory = pool_memory(place.rank_pools, place.rank)
        elif config.kv_memory is not None and place.is_alone and self.layout.state is None:
            memory = KVMemory(config.kv_memory, identity, files.key if files else None)
        return files, memory

    def _size_pool(self, memory: KVMemory | None) -> PoolSize:
        size = size_cpu_pool(
            self.config,
            self.largest_pools,
            weight_bytes=self.num_weight_bytes,
            max_model_len=self.model.max_model_len,
            memory=memory,
            num_ranks=self.place.layout.size,
        )
        return self.least(size)

    def _read(self, quantized: Quantized | None, size: PoolSize) -> LlamaModel:
        llama = self.read_weights(
            quantized,
            self._num_threads,
            # An arena where weights stay as they are read, and are not packed.
            partial(torch.empty if self._library is None else Arena().empty, dtype=self.dtype),
            size.max_model_len,
            recurrence=_recurrence(self.model, self._num_threads),
            pipeline=self.place.pipeline,
        )
        torch.set_num_threads(self._num_threads)
        return llama

    def _tier(
        self, files: BlockFiles | None, pool: KVPools, size: PoolSize, in_flight: StepsInFlight
    ) -> DiskTier | None:
        """Blocks on the disk. They are of all ranks' pools."""
        place = self.place
        if place.rank_pools:
            place.everyone.barrier()  # so that rank 0 finds all pools
        if files is None:
            return None
        pools = [pool]
        if place.rank_pools:
            pools += pools_of_others(
                place.rank_pools,
                place.layout,
                self.whole,
                self.longest,
                size.by_group,
                self.block_size,
                self.kv_type,
            )
        return disk_tier(files, PoolBytes(pools, in_flight))

    def _native(self, llama: LlamaModel, pool: KVPools) -> NativeModel | None:
        """The compiled step, where there is one; else torch computes the model."""
        if self._library is None:
            return None
        try:
            return NativeModel(self._library, llama, pool, self._num_threads)
        except UnsupportedWeightFormat as error:
            _warn_of_torch(error)
            return None

    def _info(
        self, llama: LlamaModel, size: PoolSize, products: str, quantized: Quantized | None
    ) -> ModelInfo:
        """Measures what the device can do, too."""
        place = self.place
        computed_by = f"{products}, {self._num_threads} thread{'s' * (self._num_threads > 1)}"
        if not place.is_alone:
            computed_by += f" in each of {place.layout.size} processes"
        logger.info("computed by %s", computed_by)
        place.everyone.barrier()  # so that each measures its share
        rates = measure_rates(self.gpu, self.dtype, self.phases)
        rounding = quantized.info if quantized else None
        return self.described(llama, size, rates, rounding, computed_by)

    def _log_ledger(self, size: PoolSize, available: int) -> None:
        """available: bytes of memory, before the weights and the pool took some."""
        total = self.gpu.total_bytes
        Ledger(
            total=total,
            others=total - available,
            weights=self.num_weight_bytes,
            kv_pool=size.num_bytes(self.pools),
            adapters=most_adapter_bytes(self.config.lora, self.model, self.dtype),
        ).log(size, self.pools)


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
    """Names the formats of the linear layers that will not be plain."""
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


def _warn_of_torch(reason: InvalidModel | str) -> None:
    logger.warning(
        "torch's operators compute the model, which are slower for small batches: %s", reason
    )
