"""`load_on_cpu`: a model in the memory of a processor, from its configuration to what computes it.

Of several ranks each does so with its own part, and they wait for each other where one needs what
another has done.
"""

import logging
from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.config import AttentionBackend, Dtype, EngineConfig, KVCacheDtype
from penstock.engine.files.gguf.file import is_gguf
from penstock.engine.kernels.attention.gathered import gathered_attention
from penstock.engine.loading.place import Place
from penstock.engine.loading.rank_pools import pool_memory, pools_of_others
from penstock.engine.loading.start import (
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
from penstock.engine.memory.tiers.block_files import BlockFiles
from penstock.engine.memory.tiers.disk_tier import DiskTier
from penstock.engine.memory.tiers.offload import block_files, disk_tier, refuse_with_states
from penstock.engine.memory.tiers.pool_bytes import PoolBytes, StepsInFlight
from penstock.engine.models.at_load.quantize import Quantized, quantization_plan, quantize
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.gathered import GatheredModel, least
from penstock.engine.models.decoder.model import LlamaModel, Model
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
from penstock.engine.native.features import check_features, may_code_kv
from penstock.engine.native.inputs import gather_input
from penstock.engine.native.library import load_delta_net_library, load_library
from penstock.engine.native.model import NativeModel
from penstock.engine.native.packing import FORMATS
from penstock.engine.native.parts.delta_net import NativeRecurrence
from penstock.engine.process.phases import Phases
from penstock.engine.sampling.sampler import argmax
from penstock.engine.step.model_info import ModelInfo
from penstock.engine.step.model_input import ModelInput, build_model_input
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.types import ScheduledBatch

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_DEFAULT_BLOCK_SIZE = 16
# Read once at start for the metrics: larger than any last-level cache we know; it takes 30 ms.
BANDWIDTH_PROBE_BYTES = 256 * 2**20

BuildInput = Callable[[ScheduledBatch, Tensor, Tensor, int], ModelInput]


@dataclass(slots=True, kw_only=True)
class LoadedModel:
    """What an executor runs. native: the same as model where a step is compiled. argmax: of logits,
    the likeliest ids. make_adapter: from tensors to what a step reads."""

    model: Model
    size: PoolSize
    pool: KVPools
    info: ModelInfo
    adapters: Adapters
    tier: DiskTier | None
    steps_in_flight: StepsInFlight
    native: NativeModel | None
    build_input: BuildInput
    argmax: Callable[[Tensor], Tensor]


@dataclass(slots=True)
class _Computed:
    """What computes the model, and what that brings with it."""

    model: Model
    products: str = "torch"
    native: NativeModel | None = None
    build_input: BuildInput = build_model_input
    argmax: Callable[[Tensor], Tensor] = argmax
    make_adapter: Callable[[Adapter], Any] = field(default=lambda adapter: adapter)


def load_on_cpu(config: EngineConfig, model_dir: Path, phases: Phases, place: Place) -> LoadedModel:
    """Raises InvalidConfig and InvalidModel."""
    if config.attention_backend is not AttentionBackend.AUTO:
        raise InvalidConfig(
            f"--attention-backend {config.attention_backend} is for a GPU, and the model runs "
            "on the CPU, which has one implementation of attention; leave the flag out"
        )
    check_quantization(config, model_dir)
    return _CpuLoading(config, model_dir, phases, place).load()


class _CpuLoading:
    """The state that the steps of a start share. whole: the model of all ranks; divided: what this
    rank has of every layer; model: of its own layers."""

    def __init__(self, config: EngineConfig, model_dir: Path, phases: Phases, place: Place) -> None:
        self._config, self._model_dir = config, model_dir
        self._phases, self._place = phases, place
        # The server's process shares them: a thread that it interrupts holds up no other.
        self._num_threads = config.num_threads or max(1, num_cores() // place.num_ranks)
        self._whole = ModelConfig.from_dir(model_dir)
        check_dtype(config.dtype, self._whole)
        if any(self._whole.recurrent):
            refuse_with_states(config)
        # None where there is one of them, so that a checkpoint is read as it is.
        self._shard = None if place.group is None else place.shard(self._whole)
        self._divided = place.shard(self._whole).config
        self._stage = None if place.pipeline is None else place.stage(self._divided)
        self._model = place.stage(self._divided).config
        self._block_size = config.block_size or _DEFAULT_BLOCK_SIZE
        self._steps_in_flight = StepsInFlight()

    def load(self) -> LoadedModel:
        config, place, phases = self._config, self._place, self._phases
        self._choose_types()
        # Before the weights are read, so that a model that does not fit is reported at once.
        self._plan_weights()
        files, memory = self._plan_pool()
        place.barrier()  # the memory that is free is divided before anybody takes some
        available = available_memory_bytes()
        size = self._size_pool(memory)
        quantized = self._quantize()
        llama = self._read_weights(quantized, size)
        with phases.timed("kv_pool", "allocating the pool of keys and values"):
            pool = KVPools(
                self._model.kv_shape,
                self._layout,
                size.of_groups,
                self._block_size,
                self._kv_type,
                _CPU,
                memory,
            )
            tier = self._tier(files, pool, size)
            computed = self._compiled(llama, pool)
        if place.group:
            computed.model = GatheredModel(computed.model, place.group, self._whole.vocab_size)
        info = self._described(llama, size, computed.products, quantized)
        adapters = Adapters(
            config.lora,
            self._model,
            self._dtype,
            _CPU,
            config.scheduler.max_num_seqs,
            computed.make_adapter,
            part=RankPart(whole=self._whole, shard=self._shard, first_layer=llama.first_layer),
        )
        self._log_ledger(size, available)
        return LoadedModel(
            model=computed.model,
            size=size,
            pool=pool,
            info=info,
            adapters=adapters,
            tier=tier,
            steps_in_flight=self._steps_in_flight,
            native=computed.native,
            build_input=computed.build_input,
            argmax=computed.argmax,
        )

    def _choose_types(self) -> None:
        """The types of weights, keys and values, and what computes them."""
        place = self._place
        with self._phases.timed("compile", "loading the step that is compiled for this processor"):
            if not place.is_first:
                place.barrier()  # rank 0 compiles for all
            self._dtype, self._library = _dtype_and_library(
                self._config, self._divided, self._model_dir
            )
            if place.is_first:
                place.barrier()
        self._kv_type = kv_dtype(self._config.kv_cache_dtype, self._dtype)
        self._make_linear: MakeLinear = PlainLinear
        if self._library is None:
            has_experts = self._model.experts is not None
            self._make_linear = cpu_linear(self._dtype, has_experts=has_experts)
        self._kept = AsStored(() if self._library is None else FORMATS)

    def _plan_weights(self) -> None:
        config, model, dtype = self._config, self._model, self._dtype
        log_text_only(config, model)
        log_widening(model, dtype, self._kept)
        self._plan = quantization_plan(config.quantization, model, dtype, stage=self._stage)
        self._num_weight_bytes = weight_bytes(
            model,
            config.load_format,
            self._model_dir,
            dtype,
            kept=self._kept,
            plan=self._plan,
            stage=self._stage,
        )

    def _plan_pool(self) -> tuple[BlockFiles | None, KeptMemory | None]:
        """The files of blocks, and the memory that the pool is in, where these are given."""
        config, place, model = self._config, self._place, self._model
        itemsize = self._kv_type.itemsize
        self._longest = resolve_max_model_len(config.max_model_len, model.max_model_len)
        whole_layout = self._divided.kv_layout(self._longest)
        stage = place.stage(self._divided)
        self._pools = stage.pools(whole_layout, self._block_size, itemsize)
        self._layout = stage.layout(whole_layout)
        # What decides the bytes of a block of the same tokens.
        compiled = None if self._library is None else Path(self._library._name).name
        formats = (self._dtype, self._kv_type, config.load_format, config.quantization)
        divided = () if place.is_alone else (place.layout,)
        identity = identity_of(
            self._model_dir, model, formats, self._block_size, compiled, self._layout, *divided
        )
        files = block_files(config, identity) if place.is_first else None
        memory = None
        if place.rank_pools and not place.is_alone:
            memory = pool_memory(place.rank_pools, place.rank)
        elif config.kv_memory is not None and place.is_alone and self._layout.state is None:
            memory = KeptMemory(config.kv_memory, identity, files.key if files else None)
        return files, memory

    def _size_pool(self, memory: KeptMemory | None) -> PoolSize:
        """As many blocks as the rank has memory for that has least."""
        size = size_cpu_pool(
            self._config,
            self._pools,
            weight_bytes=self._num_weight_bytes,
            max_model_len=self._model.max_model_len,
            kept=memory,
            num_ranks=self._place.num_ranks,
        )
        if (everyone := self._place.everyone) is None:
            return size
        num_blocks, *more, max_len = least(everyone, [*size.of_groups, size.max_model_len])
        return PoolSize(num_blocks, max_len, tuple(more))

    def _quantize(self) -> Quantized | None:
        if self._plan is None:
            return None
        with torch.inference_mode():
            return quantize(
                self._config,
                self._model_dir,
                self._plan,
                self._phases,
                self._num_threads,
                shard=self._shard,
                stage=self._stage,
            )

    def _read_weights(self, quantized: Quantized | None, size: PoolSize) -> LlamaModel:
        what, place = reading(self._num_weight_bytes, self._dtype), self._place
        timed = self._phases.timed("weights", what, total=self._num_weight_bytes)
        with timed, torch.inference_mode():
            # The threads that read are Python's; each of torch's calls inside them uses one.
            torch.set_num_threads(1)
            # An arena where weights stay as they are read, and are not packed.
            empty = torch.empty if self._library is None else Arena().empty
            source = weight_source(
                self._config.load_format,
                self._model_dir,
                self._model,
                partial(empty, dtype=self._dtype),
                self._phases,
                quantized,
                make_linear=self._make_linear,
                kept=self._kept,
                shard=self._shard,
            )
            llama = LlamaModel(
                self._model,
                place.stage(self._divided).of(source),
                self._make_linear,
                gathered_attention,
                max_model_len=size.max_model_len,
                device=_CPU,
                num_load_threads=self._num_threads,
                shard=self._shard,
                group=place.group,
                recurrence=_recurrence(self._model, self._num_threads),
                stage=self._stage,
                pipeline=place.pipeline,
                dtype=self._dtype,
            )
            torch.set_num_threads(self._num_threads)
        return llama

    def _tier(self, files: BlockFiles | None, pool: KVPools, size: PoolSize) -> DiskTier | None:
        """Blocks on the disk. They are of all ranks' pools."""
        place = self._place
        if place.rank_pools:
            place.barrier()  # so that rank 0 finds all pools
        if files is None:
            return None
        pools = [pool]
        if place.rank_pools:
            pools += pools_of_others(
                place.rank_pools,
                place.layout,
                self._whole,
                self._longest,
                size.of_groups,
                self._block_size,
                self._kv_type,
            )
        return disk_tier(files, PoolBytes(pools, self._steps_in_flight))

    def _compiled(self, llama: LlamaModel, pool: KVPools) -> _Computed:
        """The compiled step where there is one, and else torch."""
        if self._library is None:
            return _Computed(llama)
        try:
            native = NativeModel(self._library, llama, pool, self._num_threads)
        except UnsupportedWeightFormat as error:
            _warn_of_torch(error)
            return _Computed(llama)
        return _Computed(
            native,
            native.products,
            native,
            partial(gather_input, self._library),
            native.argmax,
            native.packed_adapter,
        )

    def _described(
        self, llama: LlamaModel, size: PoolSize, products: str, quantized: Quantized | None
    ) -> ModelInfo:
        """Measures what the device can do, too."""
        place, phases = self._place, self._phases
        computed_by = f"{products}, {self._num_threads} thread{'s' * (self._num_threads > 1)}"
        if place.num_ranks > 1:
            computed_by += f" in each of {place.num_ranks} processes"
        logger.info("computed by %s", computed_by)
        place.barrier()  # so that each measures its share
        with phases.timed("bandwidth", "measuring how fast memory is read"):
            bandwidth = read_bandwidth(BANDWIDTH_PROBE_BYTES)
        with phases.timed("flops", "measuring how fast matrices are multiplied"):
            flops = matmul_flops(self._dtype)
        info = describe(
            self._model,
            self._dtype,
            "cpu",
            size,
            self._block_size,
            bandwidth,
            phases.seconds,
            flops,
            weight_bytes=llama.step_weight_bytes,
            expert_bytes=llama.expert_bytes,
            kv_dtype=self._kv_type,
            computed_by=computed_by,
            quantization=quantized.info if quantized else None,
            layout=self._layout,
        )
        if place.is_alone:
            return info
        sizes = place.layout
        return of_ranks(
            info, self._whole, tensor_size=sizes.tensor_size, num_stages=sizes.num_stages
        )

    def _log_ledger(self, size: PoolSize, available: int) -> None:
        """available: bytes of memory, before the weights and the pool took some."""
        total = total_memory_bytes()
        pools = self._layout.pools(self._model.kv_shape, self._block_size, self._kv_type.itemsize)
        Ledger(
            total=total,
            others=total - available,
            weights=self._num_weight_bytes,
            kv_pool=size.num_bytes(pools),
            adapters=most_adapter_bytes(self._config.lora, self._model, self._dtype),
        ).log(size, pools)


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


def _warn_of_torch(reason: InvalidModel | str) -> None:
    logger.warning(
        "torch's operators compute the model, which are slower for small batches: %s", reason
    )
