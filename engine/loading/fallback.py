"""`FallbackLoading`: a class of transformers over our paged pool, for families that have no row of
their own.

Slow: one operator at a time, on whichever device; steps are made, and ids sampled, on the host.
"""

import logging
from collections import defaultdict

import torch

from penstock.engine.config import AttentionBackend, EngineConfig, ModelImpl
from penstock.engine.executors.cpu import HostModel
from penstock.engine.loading.description import device_fields, dtype_name
from penstock.engine.loading.devices import (
    choose_dtype,
    measure_rates,
    run_largest_step,
    size_gpu_pool,
)
from penstock.engine.loading.steps import Loading
from penstock.engine.memory.dtypes import kv_dtype
from penstock.engine.memory.gpu_budget import MemoryBudget
from penstock.engine.memory.ledger import Ledger, pool_notes
from penstock.engine.memory.machine import num_cores
from penstock.engine.memory.pool.kv_layout import KVLayout
from penstock.engine.memory.pool.kv_pool import (
    KVPool,
    KVPools,
    PoolSize,
    resolve_max_model_len,
    size_cpu_pool,
)
from penstock.engine.memory.pool.kv_shape import KVHeads
from penstock.engine.memory.tiers.offload import refuse_offload
from penstock.engine.models.fallback.check import check_model
from penstock.engine.models.fallback.load import (
    TransformersConfig,
    WeightCount,
    check_ropes,
    load_network,
)
from penstock.engine.models.fallback.model import TransformersModel
from penstock.engine.models.lora.store import no_adapters
from penstock.engine.sampling.grammar_table import load_grammars
from penstock.engine.step.model_info import ModelInfo
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.step_model.amounts import AttentionGroup

logger = logging.getLogger(__name__)

_BLOCK_SIZE = 16


class FallbackLoading(Loading):
    """Also raises InvalidModel for a class that would give wrong answers."""

    def plan(self) -> None:
        config, device = self.config, self.device
        _check_flags(config)
        self._settings = TransformersConfig.from_dir(self.directory)
        torch.set_num_threads(config.num_threads or num_cores())
        self._dtype = choose_dtype(config.dtype, device.device)
        self._kv_type = kv_dtype(config.kv_cache_dtype, self._dtype)
        self._longest = resolve_max_model_len(config.max_model_len, self._settings.max_model_len)
        self._block_size = config.block_size or _BLOCK_SIZE
        check_ropes(self._settings, self._longest)
        self._others = device.used_bytes()

    @property
    def reading(self) -> str:
        name = self._settings.architecture
        return f"transformers reads the weights of {name}, as {dtype_name(self._dtype)}"

    def read(self, _: object) -> None:
        network = load_network(
            self._settings, self.directory, self._dtype, self.device.device, self.config.load_format
        )
        self._weights = WeightCount.of(network)
        self._model = model = TransformersModel(network, self._longest)
        # One pool: what layers without a window need, the others have too.
        windows = {layer.window for layer in model.layers.values()}
        window = windows.pop() if len(windows) == 1 else None
        self._layout = KVLayout.of([window] * model.kv_shape.num_layers, self._longest)
        itemsize = self._kv_type.itemsize
        self._pools = self._layout.pools(model.kv_shape, self._block_size, itemsize)

    def measure_step(self) -> int | None:
        """On a GPU: runs the largest step at the end of the longest sequence, all in one block."""
        what = "comparing short prompts with transformers' own attention"
        with self.phases.timed("activations", what):
            check_model(self._model, self._settings.vocab_size, self._longest)
            if not self.device.has_kernels:
                return None
            shape, kind, gpu = self._model.kv_shape, self._kv_type, self.device
            gpu.release()
            used = gpu.used_bytes()
            pool = KVPool(shape, 1, _BLOCK_SIZE, kind, gpu.device)
            run_largest_step(self._model, pool, self.config.scheduler, self._longest, _BLOCK_SIZE)
            # Torch frees nothing by itself, so this is the peak.
            activations = max(0, gpu.used_bytes() - used)
            del pool
            gpu.release()
            return activations

    def size_pool(self) -> PoolSize:
        if self.activations is None:
            return size_cpu_pool(
                self.config,
                self._pools,
                weight_bytes=0,  # which are no longer free memory
                max_model_len=self._longest,
            )
        total, used = self.device.total_bytes, self.device.used_bytes()
        budget = MemoryBudget(total=total, used=used, reserved=self.activations)
        return size_gpu_pool(self.config, self._pools, budget, self._longest)

    def complete(self, size: PoolSize) -> HostModel:
        config, settings, seqs = self.config, self._settings, self.config.scheduler.max_num_seqs
        sizes = size.by_group, self._block_size
        shape, device = self._model.kv_shape, self.device.device
        by = f"the class {settings.architecture} of transformers"
        wanted = config.model_impl is ModelImpl.TRANSFORMERS
        why = "--model-impl asks for it" if wanted else "its family has no implementation of ours"
        logger.warning("computed by %s, since %s: slower than ours by several times", by, why)
        ids = settings.vocab_size, settings.eos_token_ids
        return HostModel(
            model=self._model,
            pool=KVPools(shape, self._layout, *sizes, self._kv_type, device),
            info=self._info(size, by),
            adapters=no_adapters(seqs),
            grammars=load_grammars(config, self.directory, *ids),
            max_num_seqs=seqs,
            ledger=Ledger(
                total=self.device.total_bytes,
                others=self._others,
                weights=self._weights.num_bytes,
                kv_pool=size.num_bytes(self._pools),
                activations=self.activations,
                pool_notes=pool_notes(size, self._pools),
            ),
        )

    def _info(self, size: PoolSize, computed_by: str) -> ModelInfo:
        settings, weights, name = self._settings, self._weights, self.device.name
        return ModelInfo(
            architecture=settings.family,
            vocab_size=settings.vocab_size,
            hidden_size=settings.hidden_size,
            pooled_size=settings.hidden_size,
            eos_token_ids=settings.eos_token_ids,
            num_parameters=weights.num_parameters,
            weight_bytes=weights.step_bytes,
            attention=_attention_groups(self._model, self._kv_type.itemsize),
            flops_per_token=weights.flops_per_token,
            flops_per_sampled_token=2 * settings.vocab_size * settings.hidden_size,
            load_seconds=self.phases.seconds,
            computed_by=computed_by,
            experts=weights.experts,
            model_impl="transformers",
            **device_fields(self._dtype, self._kv_type, name, size, self._block_size),
            **measure_rates(self.device, self._dtype, self.phases),
        )


def _check_flags(config: EngineConfig) -> None:
    """Raises InvalidConfig for what only our own implementations have."""
    wanted = {
        f"--quantization {config.quantization}": config.quantization is not None,
        "--enable-lora": config.lora is not None,
        f"--attention-backend {config.attention_backend}": (
            config.attention_backend is not AttentionBackend.AUTO
        ),
    }
    for flag, is_given in wanted.items():
        if is_given:
            raise InvalidConfig(
                f"{flag} is for the families that Penstock implements itself, and this model is "
                "computed by a class of transformers; leave it out"
            )
    refuse_offload(config, "by a class of transformers")


def _attention_groups(model: TransformersModel, itemsize: int) -> tuple[AttentionGroup, ...]:
    """Counts what is read, which is less than the pool holds where layers differ in width."""
    kv_bytes: dict[int | None, int] = defaultdict(int)
    flops: dict[int | None, int] = defaultdict(int)
    for layer in model.layers.values():
        for width in (layer.key_dim, layer.value_dim):
            one = KVHeads(layer.num_kv_heads, width)
            kv_bytes[layer.window] += one.bytes_per_token(itemsize) // 2
            flops[layer.window] += 2 * layer.num_heads * width
    return tuple(
        AttentionGroup(window=window, kv_bytes_per_token=kv_bytes[window], flops_per_pair=each)
        for window, each in flops.items()
    )
