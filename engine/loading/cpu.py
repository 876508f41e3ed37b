"""`CpuLoading`: a model in the memory of a processor."""

import logging
from collections.abc import Callable, Iterator
from ctypes import CDLL
from functools import partial
from pathlib import Path

import torch

from penstock.engine.config import (
    AttentionBackend,
    Dtype,
    EngineConfig,
    KVCacheDtype,
    SpeculativeConfig,
)
from penstock.engine.executors.cpu import HostModel
from penstock.engine.files.gguf.file import is_gguf
from penstock.engine.loading.devices import choose_dtype, measure_rates
from penstock.engine.loading.steps import DecoderLoading
from penstock.engine.loading.weights import most_adapter_bytes
from penstock.engine.memory.host import Arena
from penstock.engine.memory.ledger import Ledger, pool_notes
from penstock.engine.memory.machine import num_cores
from penstock.engine.memory.pool.kv_memory import KVMemory
from penstock.engine.memory.pool.kv_pool import KVPools, PoolSize, size_cpu_pool
from penstock.engine.memory.tiers.disk_tier import DiskTier
from penstock.engine.memory.tiers.offload import block_files, disk_tier
from penstock.engine.memory.tiers.pool_bytes import PoolBytes, StepsInFlight
from penstock.engine.models.at_load.quantize import Quantized, quantization_plan
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.model import GatheredModel, Model
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.division.stage import Stage
from penstock.engine.models.errors import (
    InvalidModel,
    UnsupportedFeature,
    UnsupportedWeightFormat,
    WrongProducts,
)
from penstock.engine.models.formats.kept import AsStored
from penstock.engine.models.gguf.weights import weight_formats as gguf_formats
from penstock.engine.models.layers.linear import cpu_linear
from penstock.engine.native.features import check_features, may_code_kv
from penstock.engine.native.inputs import gather_input
from penstock.engine.native.library import load_library
from penstock.engine.native.model import NativeModel
from penstock.engine.native.packing import FORMATS
from penstock.engine.ranks.membership import Membership
from penstock.engine.step.model_info import ModelInfo
from penstock.engine.step.model_input import as_encoder_input
from penstock.scheduler.errors import InvalidConfig

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
# The memory of a rank's pool is of one start alone, so there is nothing that it could be taken for.
_RANK_IDENTITY = bytes(32)


class CpuLoading(DecoderLoading):
    """Of several ranks each loads its own part, and they wait for each other where one needs what
    another has done."""

    place: Membership
    default_block_size = 16
    may_have_encoder = True
    bytes_beside = 0
    """What is not of this model, and takes memory that its pool cannot have."""

    def plan(self) -> None:
        config, place = self.config, self.place
        if config.attention_backend is not AttentionBackend.AUTO:
            raise InvalidConfig(
                f"--attention-backend {config.attention_backend} is for a GPU, and the model runs "
                "on the CPU, which has one implementation of attention; leave the flag out"
            )
        self.plan_model()
        identity = self.identity(self._library and Path(self._library._name).name)
        self._files = block_files(config, identity) if place.rank == 0 else None
        self._memory = self._pool_memory(identity)
        place.everyone.barrier()  # the memory that is free is divided before anybody takes some
        self._others = self.device.used_bytes()
        size = size_cpu_pool(
            config,
            self.largest_pools,
            weight_bytes=(self.num_weight_bytes or 0) + self.bytes_beside + self.row_bytes,
            max_model_len=self.longest,
            memory=self._memory,
            num_ranks=place.layout.size,
            only_of_steps=self.whole.is_encoder,
        )
        self._size = self.least(size)

    def plan_model(self) -> None:
        """How it is computed, and what it takes in memory."""
        dtype = self._choose_library()
        self.plan_weights(dtype, AsStored(() if self._library is None else FORMATS))
        self.plan_pool()

    @property
    def num_threads(self) -> int:
        # The server's process shares them: a thread that it interrupts holds up no other.
        return self.config.num_threads or max(1, num_cores() // self.place.layout.size)

    def read(self, quantized: Quantized | None) -> None:
        threads = self.num_threads
        self.read_weights(
            quantized,
            threads,
            # An arena where weights stay as they are read, and are not packed.
            partial(torch.empty if self._library is None else Arena().empty, dtype=self.dtype),
            self._size.max_model_len,
            pipeline=self.place.pipeline,
        )
        torch.set_num_threads(threads)

    def size_pool(self) -> PoolSize:
        return self._size

    def complete(self, size: PoolSize) -> HostModel:
        shape, sizes = self.model.kv_shape, (size.by_group, self.block_size)
        pool = KVPools(shape, self.layout, *sizes, self.kv_type, _CPU, self._memory)
        steps_in_flight = StepsInFlight()
        tier = self._tier(pool, size, steps_in_flight)
        native = self._native(pool)
        model: Model = native or self.llama
        if (group := self.place.tensor).size > 1:
            model = GatheredModel(model, group, self.whole.vocab_size)
        info = self._info(size, native)
        loaded = HostModel(
            model=model,
            pool=pool,
            info=info,
            adapters=self.adapters(**({} if native is None else {"make": native.packed_adapter})),
            grammars=self.grammars(),
            max_num_seqs=self.config.scheduler.max_num_seqs,
            tier=tier,
            steps_in_flight=steps_in_flight,
            native=native,
            place=self.place,
            encoder=self.encoder,
            pooled=self.pooled,
            ledger=Ledger(
                total=self.device.total_bytes,
                others=self._others,
                weights=self.num_weight_bytes or 0,
                kv_pool=size.num_bytes(self.pools),
                adapters=most_adapter_bytes(self.config.lora, self.model, self.dtype),
                drafts=self._draft_bytes() if info.takes_drafts else None,
                encoder=self.row_bytes or None,
                pool_notes=pool_notes(size, self.pools),
            ),
        )
        if native is not None and self._library is not None:
            loaded.build_input, loaded.draw = partial(gather_input, self._library), native.draw
        if self.whole.is_encoder:
            build = loaded.build_input
            loaded.build_input = lambda *tables: as_encoder_input(build(*tables))
        return loaded

    def _draft_bytes(self) -> int | None:
        """Of the most drafts of a step: what each recurrent layer's projections give for them, in
        float32, in rows as wide as any layer's, and the quarter by which a buffer grows."""
        num_layers = sum(self.model.recurrent)
        wanted = self.config.speculative or SpeculativeConfig()
        scheduler = self.config.scheduler
        most = min(
            wanted.num_speculative_tokens * scheduler.max_num_seqs, scheduler.max_step_tokens
        )
        widths = [
            sum(each.shape[0] for name, each in layer.mixer.linears.items() if name != "output")
            for layer in self.model.layers
        ]
        return 5 * num_layers * most * max(widths) or None

    def _choose_library(self) -> torch.dtype:
        """The compiled step, where there is one, and the type of the weights."""
        place = self.place
        with self.phases.timed("compile", "loading the step that is compiled for this processor"):
            if place.rank > 0:
                place.everyone.barrier()  # rank 0 compiles for all
            dtype, self._library = _dtype_and_library(self.config, self.divided, self.directory)
            if place.rank == 0:
                place.everyone.barrier()
        if self._library is None:
            self.make_linear = cpu_linear(dtype, has_experts=self.model.experts is not None)
        return dtype

    def _pool_memory(self, identity: bytes) -> KVMemory | None:
        """The memory that the pool is in, where it is given: to the ranks after the first where a
        tier moves blocks of all, or one that outlives this process."""
        config, place = self.config, self.place
        if place.pools:
            return KVMemory(place.pools[place.rank - 1], _RANK_IDENTITY) if place.rank else None
        if config.kv_memory is None or place.layout.size > 1:
            return None
        return KVMemory(config.kv_memory, identity, self._files.key if self._files else None)

    def _tier(self, pool: KVPools, size: PoolSize, in_flight: StepsInFlight) -> DiskTier | None:
        """Blocks on the disk. A block is moved with those of all ranks as one piece, under one
        digest: so it is stored, found, verified and loaded as a whole, and no rank is asked."""
        if self.place.pools:
            self.place.everyone.barrier()  # so that rank 0 finds all pools
        if self._files is None:
            return None
        pools = [pool, *self._pools_of_others(size.by_group)]
        return disk_tier(self._files, PoolBytes(pools, in_flight))

    def _pools_of_others(self, num_blocks: tuple[int, ...]) -> Iterator[KVPools]:
        """Those of the ranks after the first, once all have made theirs."""
        ranks = self.place.layout
        for rank, descriptor in enumerate(self.place.pools, start=1):
            model = Shard(self.whole, ranks.tensor_rank_of(rank), ranks.tensor_size).config
            stage = Stage(model, ranks.stage_of(rank), ranks.num_stages)
            layout = stage.layout(model.kv_layout(self.longest))
            memory = KVMemory(descriptor, _RANK_IDENTITY)
            assert memory.num_blocks == num_blocks, (rank, memory.num_blocks, num_blocks)
            sizes = num_blocks, self.block_size
            yield KVPools(stage.config.kv_shape, layout, *sizes, self.kv_type, _CPU, memory)

    def _native(self, pool: KVPools) -> NativeModel | None:
        """The compiled step, where there is one; else torch computes the model."""
        if self._library is None:
            return None
        try:
            return NativeModel(self._library, self.llama, pool, self.num_threads)
        except (UnsupportedWeightFormat, WrongProducts) as error:
            _warn_of_torch(error)
            return None

    def _info(self, size: PoolSize, native: NativeModel | None) -> ModelInfo:
        """Measures what the device can do, too."""
        place, threads = self.place, self.num_threads
        products = "torch" if native is None else native.products
        computed_by = f"{products}, {threads} thread{'s' * (threads > 1)}"
        if place.layout.size > 1:
            computed_by += f" in each of {place.layout.size} processes"
        logger.info("computed by %s", computed_by)
        place.everyone.barrier()  # so that each measures its share
        is_shared = place.layout.size > 1
        rates = measure_rates(self.device, self.dtype, self.phases, is_shared=is_shared)
        return self.described(
            size,
            computed_by=computed_by,
            # Torch's operators round by the number of rows.
            takes_drafts=native is not None
            and self.whole.generates
            and not (self._accepts_late and any(self.whole.recurrent)),
            **rates,
        )

    @property
    def _accepts_late(self) -> bool:
        """Whether a state may be used before it has gone on over what was accepted, which other
        ranks learn with the next step: a stage may have computed that by then, and a tier may have
        moved the state."""
        layout = self.place.layout
        return layout.num_stages > 1 or (layout.size > 1 and self.config.kv_offload_dir is not None)


def _dtype_and_library(
    config: EngineConfig, model: ModelConfig, model_dir: Path
) -> tuple[torch.dtype, CDLL | None]:
    dtype = choose_dtype(config.dtype, _CPU)
    if reason := _lacking(config.kv_cache_dtype, model):
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


def _lacking(wanted: KVCacheDtype, model: ModelConfig) -> str | None:
    """Says why the compiled step has no such KV cache, where it has none."""
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


def _warn_of_torch(reason: InvalidModel | str) -> None:
    logger.warning(
        "torch's operators compute the model, which are slower for small batches: %s", reason
    )
