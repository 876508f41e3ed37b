"""`load_fallback`: a class of transformers over our paged pool, for families that have no row of
their own.

Slow: one operator at a time, on whichever device; steps are made, and ids sampled, on the host.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.engine.config import AttentionBackend, EngineConfig, ModelImpl
from penstock.engine.executors.cuda.device import CudaGpu, Gpu, Processor
from penstock.engine.executors.loaded_model import LoadedModel
from penstock.engine.loading.choices import choose_device, choose_dtype
from penstock.engine.loading.description import dtype_name
from penstock.engine.loading.devices import measure_rates, out_of_memory_advice, size_gpu_pool
from penstock.engine.loading.grammars import load_grammars
from penstock.engine.loading.ledger import Ledger
from penstock.engine.memory.dtypes import kv_dtype
from penstock.engine.memory.gpu_budget import MemoryBudget
from penstock.engine.memory.hardware import peak_bandwidth, peak_flops
from penstock.engine.memory.machine import num_cores
from penstock.engine.memory.pool.kv_layout import GroupPool, KVLayout
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
from penstock.engine.models.fallback.load import TransformersConfig, check_ropes, load_network
from penstock.engine.models.fallback.model import TransformersModel
from penstock.engine.models.fallback.weights import WeightCount
from penstock.engine.models.lora.store import Adapters
from penstock.engine.process.phases import Phases
from penstock.engine.step.model_info import AttentionGroup, ModelInfo
from penstock.engine.step.model_input import ModelInput
from penstock.scheduler.errors import InvalidConfig

logger = logging.getLogger(__name__)

_BLOCK_SIZE = 16
_CPU = torch.device("cpu")


def load_fallback(
    config: EngineConfig, model_dir: Path, phases: Phases | None = None, device: Gpu | None = None
) -> LoadedModel:
    """device: that of --device where none is given. Raises InvalidConfig and InvalidModel, for a
    class that would give wrong answers too."""
    _check_flags(config)
    phases = phases or Phases()
    if device is None:
        chosen = choose_device(config.device)
        device = CudaGpu(chosen) if chosen.type == "cuda" else Processor()
    with out_of_memory_advice(config, phases), torch.inference_mode():
        return _FallbackLoading(config, model_dir, phases, device).load()


class _FallbackLoading:
    """The state that the steps share."""

    def __init__(self, config: EngineConfig, model_dir: Path, phases: Phases, device: Gpu) -> None:
        self._config, self._model_dir, self._phases = config, model_dir, phases
        self._device = device
        self._settings = TransformersConfig.from_dir(model_dir)
        torch.set_num_threads(config.num_threads or num_cores())
        self._dtype = choose_dtype(config.dtype, device.device)
        self._kv_type = kv_dtype(config.kv_cache_dtype, self._dtype)
        self._longest = resolve_max_model_len(config.max_model_len, self._settings.max_model_len)
        self._block_size = config.block_size or _BLOCK_SIZE
        check_ropes(self._settings, self._longest)

    def load(self) -> LoadedModel:
        config, phases, settings = self._config, self._phases, self._settings
        before = self._device.used_bytes()
        name = settings.architecture
        what = f"transformers reads the weights of {name}, as {dtype_name(self._dtype)}"
        with phases.timed("weights", what):
            model = self._model = self._read()
        # One pool: what layers without a window need, the others have too.
        windows = {layer.window for layer in model.layers.values()}
        window = windows.pop() if len(windows) == 1 else None
        layout = KVLayout.of([window] * model.kv_shape.num_layers, self._longest)
        pools = layout.pools(model.kv_shape, self._block_size, self._kv_type.itemsize)
        with phases.timed(
            "activations", "comparing short prompts with transformers' own attention"
        ):
            check_model(model, settings.vocab_size, self._longest)
            activations = self._measured_step()
        with phases.timed("kv_pool", "allocating the pool of keys and values"):
            size = self._size_pool(pools, activations)
            sizes = size.by_group, self._block_size
            pool = KVPools(model.kv_shape, layout, *sizes, self._kv_type, self._device.device)
        by = f"the class {name} of transformers"
        loaded = LoadedModel(
            model=model,
            pool=pool,
            info=self._info(size, by),
            adapters=Adapters(None, None, self._dtype, _CPU, config.scheduler.max_num_seqs),
            grammars=load_grammars(
                config, self._model_dir, settings.vocab_size, settings.eos_token_ids
            ),
            max_num_seqs=config.scheduler.max_num_seqs,
        )
        wanted = config.model_impl is ModelImpl.TRANSFORMERS
        why = "--model-impl asks for it" if wanted else "its family has no implementation of ours"
        logger.warning("computed by %s, since %s: slower than ours by several times", by, why)
        Ledger(
            total=self._device.total_bytes,
            others=before,
            weights=self._weights.num_bytes,
            kv_pool=size.num_bytes(pools),
            activations=activations,
        ).log(size, pools)
        return loaded

    def _read(self) -> TransformersModel:
        network = load_network(
            self._settings,
            self._model_dir,
            self._dtype,
            self._device.device,
            self._config.load_format,
        )
        self._weights = WeightCount.of(network)
        return TransformersModel(network, self._longest)

    def _measured_step(self) -> int | None:
        """The bytes that the largest step takes on a GPU besides weights and pool: at the end of
        the longest sequence, all in one block."""
        if type(self._device) is Processor:
            return None
        scheduler, gpu = self._config.scheduler, self._device
        max_len = self._longest
        count = min(scheduler.max_num_batched_tokens, max_len)
        gpu.release()
        used = gpu.used_bytes()
        pool = KVPool(self._model.kv_shape, 1, _BLOCK_SIZE, self._kv_type, gpu.device)
        at = torch.arange(count)
        self._model(
            ModelInput(
                token_ids=torch.zeros_like(at),
                positions=at + max_len - count,
                kv_slots=at % _BLOCK_SIZE,
                block_tables=torch.zeros(1, -(-max_len // _BLOCK_SIZE), dtype=torch.int32),
                query_starts=[0, count],
                context_lens=[max_len],
                num_decodes=0,
                sample_rows=at[-scheduler.max_num_seqs :],
            ),
            pool,
        )
        # Torch frees nothing by itself, so this is the peak.
        activations = max(0, gpu.used_bytes() - used)
        del pool
        gpu.release()
        return activations

    def _size_pool(self, pools: Sequence[GroupPool], activations: int | None) -> PoolSize:
        if activations is None:
            return size_cpu_pool(
                self._config,
                pools,
                weight_bytes=0,  # which are no longer free memory
                max_model_len=self._longest,
            )
        total, used = self._device.total_bytes, self._device.used_bytes()
        budget = MemoryBudget(total=total, used=used, reserved=activations)
        return size_gpu_pool(self._config, pools, budget, self._longest)

    def _info(self, size: PoolSize, computed_by: str) -> ModelInfo:
        settings, weights, device = self._settings, self._weights, self._device.name
        bandwidth, flops = measure_rates(self._device, self._dtype, self._phases)
        return ModelInfo(
            architecture=settings.family,
            dtype=dtype_name(self._dtype),
            kv_cache_dtype=dtype_name(self._kv_type),
            device=device,
            vocab_size=settings.vocab_size,
            hidden_size=settings.hidden_size,
            max_model_len=size.max_model_len,
            block_size=self._block_size,
            num_blocks=size.num_blocks,
            eos_token_ids=settings.eos_token_ids,
            num_parameters=weights.num_parameters,
            weight_bytes=weights.step_bytes,
            attention=_attention_groups(self._model, self._kv_type.itemsize),
            flops_per_token=weights.flops_per_token,
            flops_per_sampled_token=2 * settings.vocab_size * settings.hidden_size,
            peak_bandwidth_bytes_per_s=peak_bandwidth(device),
            measured_bandwidth_bytes_per_s=bandwidth,
            peak_flops_per_s=peak_flops(device, self._dtype),
            measured_flops_per_s=flops,
            load_seconds=self._phases.seconds,
            computed_by=computed_by,
            experts=weights.experts,
            model_impl="transformers",
        )


def _check_flags(config: EngineConfig) -> None:
    """Raises InvalidConfig for what only our own implementations have."""
    if config.quantization is not None:
        raise InvalidConfig(
            f"--quantization {config.quantization} is for the families that Penstock implements "
            "itself, and this model is computed by a class of transformers; leave it out"
        )
    if config.lora is not None:
        raise InvalidConfig(
            "--enable-lora is for the families that Penstock implements itself, and this model is "
            "computed by a class of transformers; leave it out"
        )
    refuse_offload(config, "by a class of transformers")
    if config.attention_backend is not AttentionBackend.AUTO:
        raise InvalidConfig(
            f"--attention-backend {config.attention_backend} is for the families that Penstock "
            "implements itself, and this model is computed by a class of transformers; leave it out"
        )


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
