"""`Loading`: the steps that a start has on any device, in their order, and what they find out."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from penstock.engine.config import EngineConfig, LoadFormat
from penstock.engine.encoders.vision.tower import Tower
from penstock.engine.executors.cuda.device import Device
from penstock.engine.executors.loaded_model import LoadedModel
from penstock.engine.files.gguf.file import is_gguf
from penstock.engine.loading.description import describe, dtype_name
from penstock.engine.loading.devices import check_dtype, check_quantization, log_text_only
from penstock.engine.loading.encoder import EncoderLoading
from penstock.engine.loading.weights import log_widening, weight_bytes, weight_source
from penstock.engine.memory.dtypes import kv_dtype
from penstock.engine.memory.pool.kv_memory import identity_of
from penstock.engine.memory.pool.kv_pool import PoolSize, resolve_max_model_len
from penstock.engine.models.at_load.quantize import Quantized, quantization_plan, quantize
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.division.stage import Stage
from penstock.engine.models.formats.kept import CodePolicy
from penstock.engine.models.layers.linear import MakeLinear, PlainLinear
from penstock.engine.models.lora.store import Adapters
from penstock.engine.models.parts.reader import Empty
from penstock.engine.models.pooled_layers import PooledLayers
from penstock.engine.models.undeclared import check_tensors
from penstock.engine.process.phases import Phases
from penstock.engine.ranks.membership import Membership
from penstock.engine.sampling.grammar_table import GrammarTable, load_grammars
from penstock.engine.step.model_info import ModelInfo, QuantizationInfo
from penstock.scheduler.errors import InvalidConfig

if TYPE_CHECKING:  # which torch.distributed loads
    from penstock.engine.ranks.torch_ranks import SoleDevice, TorchRanks

# Where a rank is among those that compute a model together.
Place: TypeAlias = "Membership | TorchRanks | SoleDevice"
_CPU = torch.device("cpu")


class Loading(ABC):
    """One start, of one rank. place: its, among all; None where it is the only one."""

    num_weight_bytes: int | None = None
    """None where it is not known before they are read."""
    quantization: QuantizationInfo | None = None
    activations: int | None = None
    """The bytes that the largest step needs besides weights and pool; None where that is not
    measured."""

    def __init__(
        self,
        config: EngineConfig,
        directory: Path,
        place: "Place | None",
        device: Device,
        phases: Phases,
    ) -> None:
        """Raises InvalidConfig and InvalidModel."""
        self.config, self.directory = config, directory
        self.place, self.device, self.phases = place or self.alone(), device, phases

    def alone(self) -> Place:
        """The place of the only rank."""
        return Membership()

    def load(self) -> LoadedModel:
        """Raises InvalidConfig and InvalidModel."""
        self.plan()
        quantized = self.quantize()
        with self.phases.timed("weights", self.reading, total=self.num_weight_bytes):
            self.read(quantized)
            if quantized is not None:
                self.quantization = quantized.info
                del quantized  # the device has the codes now
                self.device.release()
            self.used = self.device.used_bytes()
        self.activations = self.measure_step()
        with self.phases.timed("kv_pool", "allocating the pool of keys and values"):
            return self.complete(self.size_pool())

    @abstractmethod
    def plan(self) -> None:
        """Decides what is to be in memory, before any of it is, so that what does not fit is
        reported at once."""

    def quantize(self) -> Quantized | None:
        return None

    @property
    @abstractmethod
    def reading(self) -> str:
        """The line of the log before weights are read."""

    @abstractmethod
    def read(self, quantized: Quantized | None) -> None:
        """quantized: the codes of layers, where the checkpoint's are not theirs."""

    def measure_step(self) -> int | None:
        return None

    @abstractmethod
    def size_pool(self) -> PoolSize: ...

    @abstractmethod
    def complete(self, size: PoolSize) -> LoadedModel:
        """Allocates the pool, and makes what computes with it."""


class DecoderLoading(Loading):
    """The start of a family that has an implementation of ours. whole: the model of all ranks;
    divided: what this rank has of every layer; model: of its own layers. default_block_size: where
    no flag says."""

    default_block_size: int
    has_head = False
    """Whether the checkpoint's layers that draft are read."""
    may_have_encoder = False
    """Whether what computes the model takes images."""
    encoder: Tower | None = None
    pooled: PooledLayers | None = None

    def __init__(self, config: EngineConfig, directory: Path, *others: Any) -> None:
        check_quantization(config, directory)
        super().__init__(config, directory, *others)
        self.whole = ModelConfig.from_dir(directory)
        check_dtype(config.dtype, self.whole)
        ranks, rank = self.place.layout, self.place.rank
        if self.whole.is_encoder and (ranks.size > 1 or self.device.has_kernels):
            raise InvalidConfig(
                f"{self.whole.family} is an encoder of text, which one process of a CPU computes; "
                "use --device cpu, without --tensor-parallel-size and --pipeline-parallel-size"
            )
        if self.whole.is_encoder and (config.lora or config.kv_offload_dir):
            flag = "--enable-lora" if config.lora else "--kv-offload-dir"
            raise InvalidConfig(
                f"{flag} has no effect on {self.whole.family}, an encoder of text; leave it out"
            )
        self.shard = Shard(self.whole, ranks.tensor_rank_of(rank), ranks.tensor_size)
        self.divided = self.shard.config
        self.stage = Stage(self.divided, ranks.stage_of(rank), ranks.num_stages)
        self.model = self.stage.config
        self.block_size = config.block_size or self.default_block_size
        self.make_linear: MakeLinear = PlainLinear

    def plan_weights(
        self, dtype: torch.dtype, kept: CodePolicy, plan_kept: CodePolicy | None = None
    ) -> None:
        """kept: what stays codes. plan_kept: the same of tensors without data."""
        config, model = self.config, self.model
        self.dtype, self.kept = dtype, kept
        self.kv_type = kv_dtype(config.kv_cache_dtype, dtype)
        self._encoder = None
        if self.may_have_encoder and self.place.layout.size == 1:
            self._encoder = EncoderLoading.of(
                config, self.directory, self.whole, dtype, self.device.device
            )
        has_safetensors = not (config.load_format is LoadFormat.DUMMY or is_gguf(self.directory))
        if has_safetensors and self.place.rank == 0:
            names = () if self._encoder is None else self._encoder.names
            check_tensors(self.directory, self.whole, has_head=self.has_head, of_encoder=names)
        if self._encoder is None:
            log_text_only(config, model)
        log_widening(model, dtype, kept)
        self.rounding = quantization_plan(config.quantization, model, dtype, plan_kept, self.stage)
        self.num_weight_bytes = weight_bytes(
            model,
            config.load_format,
            self.directory,
            dtype,
            kept=kept,
            plan=self.rounding,
            stage=self.stage,
            shard=self.shard,
        )
        if self._encoder is not None:
            self.num_weight_bytes += self._encoder.info.weight_bytes
        if self.whole.pooled is not None:
            self.num_weight_bytes += self.whole.pooled.num_bytes

    @property
    def row_bytes(self) -> int:
        """For rows of images."""
        return 0 if self._encoder is None else self._encoder.info.cache_bytes

    def plan_pool(self) -> None:
        """How the layers share pools, and what a block takes: here, and in the stage where it takes
        most, from which the number of blocks follows."""
        model, stage = self.model, self.stage
        sizes = self.block_size, self.kv_type.itemsize
        self.longest = resolve_max_model_len(
            self.config.max_model_len, model.max_model_len, model.longest
        )
        if model.is_encoder:
            self.longest = self._whole_in_a_step(self.longest)
        whole_layout = self.divided.kv_layout(self.longest)
        self.layout = stage.layout(whole_layout)
        self.pools = self.layout.pools(model.kv_shape, *sizes)
        self.largest_pools = stage.pools(whole_layout, *sizes)

    def _whole_in_a_step(self, longest: int) -> int:
        """An encoder computes a text in one step. Raises InvalidConfig where the longest that was
        asked for does not fit."""
        most = self.config.scheduler.max_step_tokens
        if longest > most and self.config.max_model_len is not None:
            raise InvalidConfig(
                f"--max-model-len is {longest}, but an encoder computes a text in one step, of at "
                f"most {most} tokens; set --max-num-batched-tokens to at least {longest}"
            )
        return min(longest, most)

    def identity(self, computed_by: object) -> bytes:
        """Equal where a block of the same tokens has the same bytes."""
        config, layout = self.config, self.place.layout
        formats = (self.dtype, self.kv_type, config.load_format, config.quantization)
        divided = () if layout.size == 1 else (layout,)
        lengthened = (self.longest,) * self.model.rotates_otherwise(self.longest)
        what = (self.model, formats, self.block_size, computed_by, self.layout, *divided)
        return identity_of(self.directory, *what, *lengthened)

    def least(self, size: PoolSize) -> PoolSize:
        """As many blocks as the rank has room for that has least."""
        numbers = self.place.least([*size.by_group, size.max_model_len])
        num_blocks, *more, max_len = numbers
        return PoolSize(num_blocks, max_len, tuple(more))

    @property
    def num_threads(self) -> int:
        raise NotImplementedError

    def quantize(self) -> Quantized | None:
        """Rounds on the device. The codes wait in this machine's memory until they are loaded."""
        if self.rounding is None:
            return None
        return quantize(
            self.config,
            self.directory,
            self.rounding,
            self.phases,
            self.num_threads,
            self.device.device,
            self.kept if self.device.has_kernels else None,
            self.shard,
            self.stage,
        )

    @property
    def reading(self) -> str:
        assert self.num_weight_bytes is not None
        size = self.num_weight_bytes / 2**30
        return f"reading {size:.3f} GiB of weights, as {dtype_name(self.dtype)}"

    def read_weights(
        self,
        quantized: Quantized | None,
        num_threads: int,
        empty: Empty,
        max_model_len: int,
        **how: Any,
    ) -> None:
        """Each weight is read once, by one of several threads, to where it stays. how: further
        arguments of `LlamaModel`."""
        # The threads that read are Python's; each of torch's calls inside them uses one.
        torch.set_num_threads(1)
        source = weight_source(
            self.config.load_format,
            self.directory,
            self.model,
            empty,
            self.phases,
            quantized,
            make_linear=self.make_linear,
            kept=self.kept,
            shard=self.shard,
        )
        tensor = self.place.tensor
        self.llama = LlamaModel(
            self.model,
            self.stage.of(source),
            self.make_linear,
            max_model_len=max_model_len,
            device=self.device.device,
            num_load_threads=num_threads,
            shard=self.shard,
            group=tensor if tensor.size > 1 else None,
            stage=self.stage,
            dtype=self.dtype,
            **how,
        )
        if self._encoder is not None:
            self.encoder = self._encoder.load(self.config.load_format, num_threads, self.phases)
        if (head := self.whole.pooled) is not None:
            is_made_up = self.config.load_format is LoadFormat.DUMMY
            device = self.device.device
            self.pooled = PooledLayers(head, self.directory, device, is_made_up=is_made_up)
            self.phases.advance(head.num_bytes)

    def grammars(self) -> GrammarTable:
        ids = self.whole.vocab_size, self.model.eos_token_ids
        return load_grammars(self.config, self.directory, *ids, samples=self.place.rank == 0)

    def adapters(
        self, device: torch.device = _CPU, /, **make_and_drop: Callable[..., Any]
    ) -> Adapters:
        """See `Adapters`."""
        return Adapters(
            self.config.lora,
            self.model,
            self.dtype,
            device,
            self.config.scheduler.max_num_seqs,
            shard=self.shard,
            first_layer=self.stage.layers.start,
            **make_and_drop,
        )

    def described(self, size: PoolSize, **measured: Any) -> ModelInfo:
        """measured: see `describe`."""
        return describe(
            self.model,
            self.dtype,
            self.device.name,
            size,
            self.block_size,
            kv_dtype=self.kv_type,
            expert_bytes=self.llama.expert_bytes,
            layout=self.layout,
            whole=self.whole,
            ranks=self.place.layout,
            weight_bytes=self.llama.step_weight_bytes,
            load_seconds=self.phases.seconds,
            quantization=self.quantization,
            encoder=None if self._encoder is None else self._encoder.info,
            **measured,
        )
