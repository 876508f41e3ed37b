"""`Loading`: the steps that a start has on any device, and what they find out."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from penstock.engine.config import EngineConfig
from penstock.engine.kernels.attention.gathered import gathered_attention
from penstock.engine.loading.choices import check_dtype, check_quantization, log_text_only
from penstock.engine.loading.description import describe
from penstock.engine.loading.place import Place
from penstock.engine.loading.weights import log_widening, reading, weight_bytes, weight_source
from penstock.engine.memory.dtypes import kv_dtype
from penstock.engine.memory.pool.kv_memory import identity_of
from penstock.engine.memory.pool.kv_pool import PoolSize, resolve_max_model_len
from penstock.engine.memory.tiers.offload import refuse_with_states
from penstock.engine.models.at_load.quantize import Quantized, quantization_plan, quantize
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.layers.kept import Kept
from penstock.engine.models.layers.linear import MakeLinear, PlainLinear
from penstock.engine.models.lora.store import Adapters
from penstock.engine.models.lora.weights import RankPart
from penstock.engine.models.parts.adapter import Adapter
from penstock.engine.models.parts.reader import Empty
from penstock.engine.process.phases import Phases
from penstock.engine.sampling.grammar import GrammarCompiler, Grammars
from penstock.engine.sampling.grammar_table import GrammarTable
from penstock.engine.step.model_info import ModelInfo, QuantizationInfo

_CPU = torch.device("cpu")


class Loading:
    """The state that the steps share. whole: the model of all ranks; divided: what this rank has of
    every layer; model: of its own layers. block_size: of the pool where no flag says."""

    def __init__(
        self,
        config: EngineConfig,
        model_dir: Path,
        phases: Phases,
        place: Place,
        device: torch.device,
        block_size: int,
    ) -> None:
        """Raises InvalidConfig and InvalidModel."""
        check_quantization(config, model_dir)
        self._config, self._model_dir = config, model_dir
        self._phases, self._place, self._device = phases, place, device
        self._whole = ModelConfig.from_dir(model_dir)
        check_dtype(config.dtype, self._whole)
        if any(self._whole.recurrent):
            refuse_with_states(config)
        self._shard = place.shard(self._whole)
        self._divided = self._shard.config
        self._stage = place.stage(self._divided)
        self._model = self._stage.config
        self._block_size = config.block_size or block_size
        self._make_linear: MakeLinear = PlainLinear

    def _plan_weights(self, dtype: torch.dtype, kept: Kept, plan_kept: Kept | None = None) -> None:
        """Before they are read, so that a model that does not fit is reported at once. kept: what
        stays codes. plan_kept: the same of tensors without data."""
        config, model = self._config, self._model
        self._dtype, self._kept = dtype, kept
        self._kv_type = kv_dtype(config.kv_cache_dtype, dtype)
        log_text_only(config, model)
        log_widening(model, dtype, kept)
        self._plan = quantization_plan(config.quantization, model, dtype, plan_kept, self._stage)
        self._num_weight_bytes = weight_bytes(
            model,
            config.load_format,
            self._model_dir,
            dtype,
            kept=kept,
            plan=self._plan,
            stage=self._stage,
        )

    def _plan_pool(self) -> None:
        """How the layers share pools, and what a block takes: here, and in the stage where it takes
        most, from which the number of blocks follows."""
        model, stage = self._model, self._stage
        sizes = self._block_size, self._kv_type.itemsize
        self._longest = resolve_max_model_len(self._config.max_model_len, model.max_model_len)
        whole_layout = self._divided.kv_layout(self._longest)
        self._layout = stage.layout(whole_layout)
        self._pools = self._layout.pools(model.kv_shape, *sizes)
        self._largest_pools = stage.pools(whole_layout, *sizes)

    def _identity(self, computed_by: object) -> bytes:
        """Equal where a block of the same tokens has the same bytes."""
        config, place = self._config, self._place
        formats = (self._dtype, self._kv_type, config.load_format, config.quantization)
        divided = () if place.is_alone else (place.layout,)
        what = (self._model, formats, self._block_size, computed_by, self._layout, *divided)
        return identity_of(self._model_dir, *what)

    def _least(self, size: PoolSize) -> PoolSize:
        """As many blocks as the rank has room for that has least."""
        numbers = self._place.least([*size.by_group, size.max_model_len])
        num_blocks, *more, max_len = numbers
        return PoolSize(num_blocks, max_len, tuple(more))

    def _quantize(self, num_threads: int, kept: Kept | None = None) -> Quantized | None:
        """Rounds on the device. The codes wait in this machine's memory until they are loaded."""
        if self._plan is None:
            return None
        with torch.inference_mode():
            return quantize(
                self._config,
                self._model_dir,
                self._plan,
                self._phases,
                num_threads,
                self._device,
                kept,
                self._shard,
                self._stage,
            )

    def _reading(self) -> AbstractContextManager[None]:
        """The phase in which weights are read."""
        what = reading(self._num_weight_bytes, self._dtype)
        return self._phases.timed("weights", what, total=self._num_weight_bytes)

    @torch.inference_mode()
    def _read_weights(
        self,
        quantized: Quantized | None,
        num_threads: int,
        empty: Empty,
        max_model_len: int,
        **how: Any,
    ) -> LlamaModel:
        """Each weight is read once, by one of several threads, to where it stays. how: further
        arguments of `LlamaModel`."""
        # The threads that read are Python's; each of torch's calls inside them uses one.
        torch.set_num_threads(1)
        source = weight_source(
            self._config.load_format,
            self._model_dir,
            self._model,
            empty,
            self._phases,
            quantized,
            make_linear=self._make_linear,
            kept=self._kept,
            shard=self._shard,
        )
        return LlamaModel(
            self._model,
            self._stage.of(source),
            self._make_linear,
            gathered_attention,
            max_model_len=max_model_len,
            device=self._device,
            num_load_threads=num_threads,
            shard=self._shard,
            group=self._place.group,
            stage=self._stage,
            dtype=self._dtype,
            **how,
        )

    def _grammars(self) -> GrammarTable:
        config, vocab_size = self._config, self._whole.vocab_size
        eos_token_ids = self._model.eos_token_ids
        grammars = Grammars(
            GrammarCompiler(self._model_dir, vocab_size, eos_token_ids, config.load_format)
        )
        if self._place.is_first:
            grammars.load_tokenizer()
        return GrammarTable(grammars, config.scheduler.max_num_seqs, vocab_size)

    def _adapters(
        self,
        make: Callable[[Adapter], Any] = lambda adapter: adapter,
        drop: Callable[[Any], None] = lambda weights: None,
    ) -> Adapters:
        """make, drop: see `Adapters`."""
        return Adapters(
            self._config.lora,
            self._model,
            self._dtype,
            _CPU,
            self._config.scheduler.max_num_seqs,
            make,
            drop,
            RankPart(whole=self._whole, shard=self._shard, first_layer=self._stage.layers.start),
        )

    def _described(
        self,
        device_name: str,
        llama: LlamaModel,
        size: PoolSize,
        quantization: QuantizationInfo | None,
        *,
        bandwidth: float | None,
        flops: float | None,
        computed_by: str | None = None,
    ) -> ModelInfo:
        return describe(
            self._model,
            self._dtype,
            device_name,
            size,
            self._block_size,
            bandwidth,
            self._phases.seconds,
            flops,
            weight_bytes=llama.step_weight_bytes,
            expert_bytes=llama.expert_bytes,
            kv_dtype=self._kv_type,
            computed_by=computed_by,
            quantization=quantization,
            layout=self._layout,
            whole=self._whole,
            ranks=self._place.layout,
        )
