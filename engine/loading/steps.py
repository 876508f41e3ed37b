"""`Loading`: the steps that a start has on any device, and what they find out."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from penstock.engine.config import EngineConfig
from penstock.engine.executors.cuda.device import Gpu
from penstock.engine.kernels.attention.gathered import gathered_attention
from penstock.engine.loading.choices import check_dtype, check_quantization, log_text_only
from penstock.engine.loading.description import describe
from penstock.engine.loading.grammars import load_grammars
from penstock.engine.loading.place import Place
from penstock.engine.loading.weights import log_widening, reading, weight_bytes, weight_source
from penstock.engine.memory.dtypes import kv_dtype
from penstock.engine.memory.pool.kv_memory import identity_of
from penstock.engine.memory.pool.kv_pool import PoolSize, resolve_max_model_len
from penstock.engine.memory.tiers.offload import refuse_with_states
from penstock.engine.models.at_load.quantize import Quantized, quantization_plan, quantize
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.formats.kept import CodePolicy
from penstock.engine.models.layers.linear import MakeLinear, PlainLinear
from penstock.engine.models.lora.store import Adapters
from penstock.engine.models.lora.weights import RankPart
from penstock.engine.models.parts.adapter import Adapter
from penstock.engine.models.parts.reader import Empty
from penstock.engine.process.phases import Phases
from penstock.engine.sampling.grammar_table import GrammarTable
from penstock.engine.step.model_info import ModelInfo, QuantizationInfo

_CPU = torch.device("cpu")


class Loading:
    """The state that the steps share. whole: the model of all ranks; divided: what this rank has of
    every layer; model: of its own layers. gpu: the device, a processor or a GPU. block_size: of the
    pool where no flag says."""

    def __init__(
        self,
        config: EngineConfig,
        model_dir: Path,
        phases: Phases,
        place: Place,
        gpu: Gpu,
        block_size: int,
    ) -> None:
        """Raises InvalidConfig and InvalidModel."""
        check_quantization(config, model_dir)
        self.config, self.model_dir = config, model_dir
        self.phases, self.place, self.gpu = phases, place, gpu
        self.whole = ModelConfig.from_dir(model_dir)
        check_dtype(config.dtype, self.whole)
        if any(self.whole.recurrent):
            refuse_with_states(config)
        self.shard = place.shard(self.whole)
        self.divided = self.shard.config
        self.stage = place.stage(self.divided)
        self.model = self.stage.config
        self.block_size = config.block_size or block_size
        self.make_linear: MakeLinear = PlainLinear

    def plan_weights(
        self, dtype: torch.dtype, kept: CodePolicy, plan_kept: CodePolicy | None = None
    ) -> None:
        """Before they are read, so that a model that does not fit is reported at once. kept: what
        stays codes. plan_kept: the same of tensors without data."""
        config, model = self.config, self.model
        self.dtype, self.kept = dtype, kept
        self.kv_type = kv_dtype(config.kv_cache_dtype, dtype)
        log_text_only(config, model)
        log_widening(model, dtype, kept)
        self.plan = quantization_plan(config.quantization, model, dtype, plan_kept, self.stage)
        self.num_weight_bytes = weight_bytes(
            model,
            config.load_format,
            self.model_dir,
            dtype,
            kept=kept,
            plan=self.plan,
            stage=self.stage,
        )

    def plan_pool(self) -> None:
        """How the layers share pools, and what a block takes: here, and in the stage where it takes
        most, from which the number of blocks follows."""
        model, stage = self.model, self.stage
        sizes = self.block_size, self.kv_type.itemsize
        self.longest = resolve_max_model_len(self.config.max_model_len, model.max_model_len)
        whole_layout = self.divided.kv_layout(self.longest)
        self.layout = stage.layout(whole_layout)
        self.pools = self.layout.pools(model.kv_shape, *sizes)
        self.largest_pools = stage.pools(whole_layout, *sizes)

    def identity(self, computed_by: object) -> bytes:
        """Equal where a block of the same tokens has the same bytes."""
        config, place = self.config, self.place
        formats = (self.dtype, self.kv_type, config.load_format, config.quantization)
        divided = () if place.is_alone else (place.layout,)
        what = (self.model, formats, self.block_size, computed_by, self.layout, *divided)
        return identity_of(self.model_dir, *what)

    def least(self, size: PoolSize) -> PoolSize:
        """As many blocks as the rank has room for that has least."""
        numbers = self.place.least([*size.by_group, size.max_model_len])
        num_blocks, *more, max_len = numbers
        return PoolSize(num_blocks, max_len, tuple(more))

    def quantize(self, num_threads: int, kept: CodePolicy | None = None) -> Quantized | None:
        """Rounds on the device. The codes wait in this machine's memory until they are loaded."""
        if self.plan is None:
            return None
        with torch.inference_mode():
            return quantize(
                self.config,
                self.model_dir,
                self.plan,
                self.phases,
                num_threads,
                self.gpu.device,
                kept,
                self.shard,
                self.stage,
            )

    def reading(self) -> AbstractContextManager[None]:
        """The phase in which weights are read."""
        what = reading(self.num_weight_bytes, self.dtype)
        return self.phases.timed("weights", what, total=self.num_weight_bytes)

    @torch.inference_mode()
    def read_weights(
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
            self.config.load_format,
            self.model_dir,
            self.model,
            empty,
            self.phases,
            quantized,
            make_linear=self.make_linear,
            kept=self.kept,
            shard=self.shard,
        )
        return LlamaModel(
            self.model,
            self.stage.of(source),
            self.make_linear,
            gathered_attention,
            max_model_len=max_model_len,
            device=self.gpu.device,
            num_load_threads=num_threads,
            shard=self.shard,
            group=self.place.group,
            stage=self.stage,
            dtype=self.dtype,
            **how,
        )

    def grammars(self) -> GrammarTable:
        ids = self.whole.vocab_size, self.model.eos_token_ids
        return load_grammars(self.config, self.model_dir, *ids, samples=self.place.is_first)

    def adapters(
        self,
        make: Callable[[Adapter], Any] = lambda adapter: adapter,
        drop: Callable[[Any], None] = lambda weights: None,
    ) -> Adapters:
        """make, drop: see `Adapters`."""
        return Adapters(
            self.config.lora,
            self.model,
            self.dtype,
            _CPU,
            self.config.scheduler.max_num_seqs,
            make,
            drop,
            RankPart(whole=self.whole, shard=self.shard, first_layer=self.stage.layers.start),
        )

    def described(
        self,
        llama: LlamaModel,
        size: PoolSize,
        rates: tuple[float | None, float | None],
        quantization: QuantizationInfo | None,
        computed_by: str | None = None,
    ) -> ModelInfo:
        """rates: of `measure_rates`."""
        bandwidth, flops = rates
        return describe(
            self.model,
            self.dtype,
            self.gpu.name,
            size,
            self.block_size,
            bandwidth,
            self.phases.seconds,
            flops,
            weight_bytes=llama.step_weight_bytes,
            expert_bytes=llama.expert_bytes,
            kv_dtype=self.kv_type,
            computed_by=computed_by,
            quantization=quantization,
            layout=self.layout,
            whole=self.whole,
            ranks=self.place.layout,
        )
