"""Where a model's weights come from, what they take in memory, and how reading them is reported."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.config import LoadFormat, LoraConfig
from penstock.engine.files.gguf.file import is_gguf
from penstock.engine.files.tensor_files import is_finite
from penstock.engine.loading.description import dtype_name
from penstock.engine.models.at_load.plan import Plan
from penstock.engine.models.at_load.quantize import Quantized
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.division.stage import Stage
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.formats.kept import CodePolicy
from penstock.engine.models.gguf.weights import GgufWeights, loaded_bytes
from penstock.engine.models.layers.linear import Linear, MakeLinear
from penstock.engine.models.lora.weights import max_adapter_bytes
from penstock.engine.models.parts.reader import Empty, TableRows, WeightSource
from penstock.engine.models.weights import Checkpoint, RandomWeights
from penstock.engine.process.phases import Phases

logger = logging.getLogger(__name__)


def weight_source(
    load_format: LoadFormat,
    model_dir: Path,
    model: ModelConfig,
    empty: Empty,
    phases: Phases,
    quantized: Quantized | None = None,
    *,
    make_linear: MakeLinear,
    kept: CodePolicy,
    shard: Shard | None = None,
) -> WeightSource:
    """phases: its current phase is advanced by the bytes of each weight. quantized: the linear
    layers, where they are not as the checkpoint has them. make_linear: see `Widened`. shard: the
    part that is read."""
    source: Checkpoint | GgufWeights | RandomWeights
    if load_format is LoadFormat.DUMMY:
        source = RandomWeights(empty, model.quantization, shard)
    elif is_gguf(model_dir):
        source = GgufWeights(model_dir, empty, kept.num_bytes, shard)
    else:
        source = Checkpoint(model_dir, empty, model.quantization, shard)
    if quantized is not None:
        return Counted(quantized.of(source, kept), phases)
    return Counted(Widened(source, empty, make_linear, kept), phases)


def log_widening(model: ModelConfig, dtype: torch.dtype, kept: CodePolicy) -> None:
    """Says what it costs that layers which are not kept are made plain."""
    if model.quantization is not None and model.has_widened(kept.num_bytes):
        stored = model.weight_bytes(dtype.itemsize)
        held = model.weight_bytes(dtype.itemsize, kept.num_bytes)
        logger.warning(
            "the weights are stored as %s, %.3f GiB; layers in a format that nothing here computes "
            "become %s as they are read, and all take %.3f GiB",
            model.quantization.name,
            stored / 2**30,
            dtype_name(dtype),
            held / 2**30,
        )


def weight_bytes(
    model: ModelConfig,
    load_format: LoadFormat,
    model_dir: Path,
    dtype: torch.dtype,
    *,
    kept: CodePolicy,
    stage: Stage,
    plan: Plan | None = None,
    shard: Shard | None = None,
) -> int:
    """Returns the memory of what `weight_source` will read. plan: of --quantization. stage: the one
    whose model and plan these are. shard: of which that is a stage."""
    if plan is not None:
        return plan.weight_bytes
    if is_gguf(model_dir) and load_format is not LoadFormat.DUMMY:
        return loaded_bytes(model_dir, dtype, kept.num_bytes, stage, shard)
    num_bytes = model.weight_bytes(dtype.itemsize, kept.num_bytes)
    return num_bytes - stage.absent_bytes(dtype.itemsize, kept.num_bytes)


def most_adapter_bytes(
    lora: LoraConfig | None, model: ModelConfig, dtype: torch.dtype
) -> int | None:
    """Returns those of as many adapters of as high a rank as may be loaded; None where none may."""
    if lora is None:
        return None
    return lora.max_loras * max_adapter_bytes(model, lora.max_rank, dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Counted:
    """Another source, whose bytes advance the current phase."""

    source: WeightSource
    phases: Phases

    def read(self, shape: tuple[int, ...], *names: str, dtype: torch.dtype | None = None) -> Tensor:
        weight = self.source.read(shape, *names, dtype=dtype)
        self.phases.advance(weight.nbytes)
        return weight

    def table(self, shape: tuple[int, int], name: str) -> TableRows:
        return self.source.table(shape, name)

    def quantized(self, shape: tuple[int, int], bias: Tensor | None, *names: str) -> Linear | None:
        linear = self.source.quantized(shape, bias, *names)
        if linear is not None:
            self.phases.advance(linear.num_bytes)
        return linear


@dataclass(frozen=True, slots=True)
class Widened:
    """Another source, whose quantized layers are made plain unless the path computes them.
    make_linear: makes the layers that are not kept."""

    source: Checkpoint | GgufWeights | RandomWeights
    empty: Empty
    make_linear: MakeLinear
    kept: CodePolicy

    def read(self, shape: tuple[int, ...], *names: str, dtype: torch.dtype | None = None) -> Tensor:
        return self.source.read(shape, *names, dtype=dtype)

    def table(self, shape: tuple[int, int], name: str) -> TableRows:
        return self.source.table(shape, name)

    def quantized(self, shape: tuple[int, int], bias: Tensor | None, *names: str) -> Linear | None:
        linear = self.source.quantized(shape, bias, *names)
        if linear is None:
            return None
        if (layer := self.kept.layer(linear)) is not None:
            return layer
        weight = self.empty(shape)
        linear.write_weight(weight)
        if weight.dtype is torch.float16 and not is_finite(weight):
            raise InvalidModel(
                f"the layer {names[0]!r} has weights above 65504, which float16 does not hold; use "
                "--dtype bfloat16 or --dtype float32"
            )
        return self.make_linear(weight, bias)
