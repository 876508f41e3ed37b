"""What all executors share at start: device and type, the source of the weights, and the ledger of
memory."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.config import Device, Dtype, EngineConfig, LoadFormat, LoraConfig
from penstock.engine.files.gguf.file import is_gguf
from penstock.engine.files.json_file import Fields
from penstock.engine.files.tensor_files import is_finite
from penstock.engine.memory.dtypes import TORCH_DTYPES
from penstock.engine.memory.hardware import computes_bfloat16, peak_bandwidth, peak_flops
from penstock.engine.memory.pool.kv_layout import GroupPool, KVLayout
from penstock.engine.memory.pool.kv_pool import PoolSize
from penstock.engine.models.at_load.plan import Plan
from penstock.engine.models.at_load.quantize import Quantized
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.division.stage import Stage
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.families.families import FAMILIES
from penstock.engine.models.gguf.weights import GgufWeights, loaded_bytes
from penstock.engine.models.layers.kept import Kept
from penstock.engine.models.layers.linear import Linear, MakeLinear
from penstock.engine.models.lora.projections import max_adapter_bytes
from penstock.engine.models.parts.source import Empty, WeightSource
from penstock.engine.models.quantization.parse import quantization_name
from penstock.engine.models.weights import Checkpoint, RandomWeights
from penstock.engine.process.phases import Phases
from penstock.engine.step.model_info import (
    AttentionGroup,
    ModelInfo,
    QuantizationInfo,
)
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.groups import StateGroup

logger = logging.getLogger(__name__)

# Of the ledger in the log.
_LINES = (
    *("weights", "adapters", "kv_pool", "activations", "graphs", "staging"),
    *("others", "free", "total"),
)
_ADAPTERS = "--max-loras of them, of --max-lora-rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where a device's memory goes, in bytes.

    others: in use before the start. adapters: of the most LoRA adapters of the highest rank; a GPU
    has it from the start, and a processor takes it as they are loaded. activations: the most that a
    step needs besides the rest. staging: of blocks on their way to the host's memory and back.
    None: not measured on this device, or not a part of it.
    """

    total: int
    others: int
    weights: int
    kv_pool: int
    adapters: int | None = None
    activations: int | None = None
    graphs: int | None = None
    staging: int | None = None

    @property
    def free(self) -> int:
        parts = (self.others, self.weights, self.kv_pool, self.adapters, self.activations)
        return self.total - sum(part or 0 for part in (*parts, self.graphs, self.staging))

    def log(self, size: PoolSize, pools: Sequence[GroupPool]) -> None:
        notes = {"kv_pool": "; ".join(_pool_notes(size, pools)), "adapters": _ADAPTERS}
        logger.info("memory, in GiB:")
        for name in _LINES:
            num_bytes = getattr(self, name)
            if num_bytes is not None:
                note = f"  ({notes[name]})" if name in notes else ""
                logger.info("%12s %9.3f%s", name, num_bytes / 2**30, note)


def _pool_notes(size: PoolSize, pools: Sequence[GroupPool]) -> Iterator[str]:
    for num_blocks, pool in zip(size.of_groups, pools, strict=True):
        if isinstance(pool.group, StateGroup):
            yield f"{num_blocks} recurrent states of {pool.block_bytes / 2**20:.1f} MiB"
            continue
        note = f"{num_blocks} blocks, {num_blocks * pool.block_size} tokens"
        window = pool.group.window
        yield note if window is None else f"{note} of layers with a window of {window}"


def choose_device(wanted: Device) -> torch.device:
    """Raises InvalidConfig where there is no such device."""
    has_cuda = torch.cuda.is_available()
    if wanted is Device.CUDA and not has_cuda:
        raise InvalidConfig("--device is cuda, but torch finds no GPU here; use --device cpu")
    on_cuda = has_cuda if wanted is Device.AUTO else wanted is Device.CUDA
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def choose_dtype(wanted: Dtype, device: torch.device) -> torch.dtype:
    if wanted is Dtype.AUTO:
        return torch.bfloat16 if computes_bfloat16(device) else torch.float32
    return TORCH_DTYPES[wanted]


def check_dtype(wanted: Dtype, model: ModelConfig) -> None:
    """Raises InvalidConfig where the model's activations do not fit the type."""
    is_float16 = TORCH_DTYPES.get(wanted) is torch.float16
    if is_float16 and FAMILIES[model.family].exceeds_float16:
        raise InvalidConfig(
            f"--dtype is {wanted}, and models of the family {model.family} have activations above "
            "65504, which float16 does not hold; use --dtype bfloat16 or --dtype float32"
        )


def weight_source(
    load_format: LoadFormat,
    model_dir: Path,
    model: ModelConfig,
    empty: Empty,
    phases: Phases,
    quantized: Quantized | None = None,
    *,
    make_linear: MakeLinear,
    kept: Kept,
    shard: Shard | None = None,
) -> WeightSource:
    """phases: its current phase is advanced by the bytes of each weight. quantized: the linear
    layers, where they are not as the checkpoint has them. make_linear: see `Widened`. shard: the
    part that is read, of safetensors alone."""
    source: Checkpoint | GgufWeights | RandomWeights
    if load_format is LoadFormat.DUMMY:
        source = RandomWeights(empty, model.quantization, shard)
    elif is_gguf(model_dir):
        assert shard is None, shard
        source = GgufWeights(model_dir, empty, kept.num_bytes)
    else:
        source = Checkpoint(model_dir, empty, model.quantization, shard)
    if quantized is not None:
        return Counted(quantized.of(source, kept), phases)
    return Counted(Widened(source, empty, make_linear, kept), phases)


def log_text_only(config: EngineConfig, model: ModelConfig) -> None:
    """Says that images are refused, to those who may expect otherwise."""
    if model.is_wrapped and not config.language_model_only:
        logger.warning(
            "%s is a model of text and images, of which the text model alone is served: its "
            "encoders are not loaded, and requests with images get 400; --language-model-only says "
            "that this is wanted",
            config.model,
        )


def log_widening(model: ModelConfig, dtype: torch.dtype, kept: Kept) -> None:
    """Says what it costs that layers which are not kept are made plain."""
    if model.quantization is not None and model.has_widened(kept.num_bytes):
        stored = model.weight_bytes(dtype.itemsize)
        held = model.weight_bytes(dtype.itemsize, kept.num_bytes)
        logger.warning(
            "the weights are stored as %s, %.3f GiB; nothing here computes that format, so they "
            "become %s as they are read, and take %.3f GiB",
            model.quantization.name,
            stored / 2**30,
            dtype_name(dtype),
            held / 2**30,
        )


def check_quantization(config: EngineConfig, model_dir: Path) -> None:
    """Raises InvalidConfig where --quantization is given and cannot be done."""
    if config.quantization is None:
        return
    if is_gguf(model_dir):
        raise InvalidConfig(
            f"--quantization {config.quantization} rounds the float weights of a Hugging Face "
            f"directory, and {model_dir} is a GGUF file; leave it out, or take a file that is "
            "quantized already"
        )
    fields = Fields.read(model_dir / "config.json")
    if name := quantization_name(fields):
        raise InvalidConfig(
            f"--quantization {config.quantization} rounds float weights, and {fields.path} says "
            f"that these are quantized already, in the format {name}; leave it out, or use the "
            "float32, float16 or bfloat16 version of the model"
        )


def weight_bytes(
    model: ModelConfig,
    load_format: LoadFormat,
    model_dir: Path,
    dtype: torch.dtype,
    *,
    kept: Kept,
    plan: Plan | None = None,
    stage: Stage | None = None,
) -> int:
    """What `weight_source` will read takes in memory. plan: of --quantization. stage: whose model
    and plan these are."""
    if plan is not None:
        return plan.weight_bytes
    if is_gguf(model_dir) and load_format is not LoadFormat.DUMMY:
        return loaded_bytes(model_dir, dtype, kept.num_bytes, stage)
    num_bytes = model.weight_bytes(dtype.itemsize, kept.num_bytes)
    return num_bytes - (stage.absent_bytes(dtype.itemsize, kept.num_bytes) if stage else 0)


def most_adapter_bytes(
    lora: LoraConfig | None, model: ModelConfig, dtype: torch.dtype
) -> int | None:
    """Of as many adapters of as high a rank as may be loaded; None where none may."""
    if lora is None:
        return None
    return lora.max_loras * max_adapter_bytes(model, lora.max_rank, dtype.itemsize)


def reading(num_bytes: int, dtype: torch.dtype) -> str:
    """What the log says before so many bytes of weights are read."""
    return f"reading {num_bytes / 2**30:.3f} GiB of weights, as {dtype_name(dtype)}"


class Counted:
    """Another source, whose bytes advance the current phase."""

    def __init__(self, source: WeightSource, phases: Phases) -> None:
        self._source = source
        self._phases = phases

    def read(self, shape: tuple[int, ...], *names: str) -> Tensor:
        weight = self._source.read(shape, *names)
        self._phases.advance(weight.nbytes)
        return weight

    def table(self, shape: tuple[int, int], name: str) -> Tensor:
        return self._source.table(shape, name)

    def quantized(self, shape: tuple[int, int], bias: Tensor | None, *names: str) -> Linear | None:
        linear = self._source.quantized(shape, bias, *names)
        if linear is not None:
            self._phases.advance(linear.num_bytes)
        return linear


class Widened:
    """Another source, whose quantized layers are made plain unless the path computes them."""

    def __init__(
        self,
        source: Checkpoint | GgufWeights | RandomWeights,
        empty: Empty,
        make_linear: MakeLinear,
        kept: Kept,
    ) -> None:
        """make_linear: makes the layers that are not kept."""
        self._source = source
        self._empty = empty
        self._make_linear = make_linear
        self._kept = kept

    def read(self, shape: tuple[int, ...], *names: str) -> Tensor:
        return self._source.read(shape, *names)

    def table(self, shape: tuple[int, int], name: str) -> Tensor:
        return self._source.table(shape, name)

    def quantized(self, shape: tuple[int, int], bias: Tensor | None, *names: str) -> Linear | None:
        linear = self._source.quantized(shape, bias, *names)
        if linear is None:
            return None
        if (layer := self._kept.layer(linear)) is not None:
            return layer
        weight = self._empty(shape)
        linear.write_weight(weight)
        if weight.dtype is torch.float16 and not is_finite(weight):
            raise InvalidModel(
                f"the layer {names[0]!r} has weights above 65504, which float16 does not hold; use "
                "--dtype bfloat16 or --dtype float32"
            )
        return self._make_linear(weight, bias)


def describe(
    model: ModelConfig,
    dtype: torch.dtype,
    device_name: str,
    size: PoolSize,
    block_size: int,
    measured_bandwidth: float | None,
    load_seconds: dict[str, float],
    measured_flops: float | None = None,
    *,
    weight_bytes: int,
    expert_bytes: int,
    kv_dtype: torch.dtype,
    computed_by: str | None = None,
    quantization: QuantizationInfo | None = None,
    layout: KVLayout | None = None,
) -> ModelInfo:
    """weight_bytes: as in `ModelInfo`. expert_bytes: of all experts of a mixture. layout: of the
    pools; None where its groups were not made for a longer sequence than size.max_model_len.
    kv_dtype: of the KV cache. load_seconds may still grow: it is not copied."""
    layout = layout or model.kv_layout(size.max_model_len)
    more_blocks, num_states, state_bytes = size.more_blocks, 0, 0
    if layout.state is not None:
        *others, num_states = more_blocks
        more_blocks, state_bytes = tuple(others), layout.state.num_bytes
    return ModelInfo(
        architecture=model.family,
        dtype=dtype_name(dtype),
        kv_cache_dtype=dtype_name(kv_dtype),
        device=device_name,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        max_model_len=size.max_model_len,
        block_size=block_size,
        num_blocks=size.num_blocks,
        eos_token_ids=model.eos_token_ids,
        num_parameters=model.num_parameters,
        weight_bytes=weight_bytes,
        attention=_attention_groups(model, layout, kv_dtype.itemsize),
        more_blocks=more_blocks,
        num_states=num_states,
        state_bytes=state_bytes,
        flops_per_token=2 * model.num_token_weights,
        flops_per_sampled_token=2 * model.vocab_size * model.hidden_size,
        peak_bandwidth_bytes_per_s=peak_bandwidth(device_name),
        measured_bandwidth_bytes_per_s=measured_bandwidth,
        peak_flops_per_s=peak_flops(device_name, dtype),
        measured_flops_per_s=measured_flops,
        load_seconds=load_seconds,
        computed_by=computed_by,
        experts=model.routed(expert_bytes),
        quantization=quantization,
    )


def _attention_groups(
    model: ModelConfig, layout: KVLayout, itemsize: int
) -> tuple[AttentionGroup, ...]:
    kv = model.kv_shape
    groups = []
    for group, window in enumerate(layout.windows):
        layers = [layer for layer, its in enumerate(layout.group_of) if its == group]
        own = layout.layers_of(group, kv)
        held = sum(kv.heads[layer].bytes_per_token(itemsize) for layer in own)
        groups.append(
            AttentionGroup(
                window=window,
                kv_bytes_per_token=sum(kv.heads[i].bytes_per_token(itemsize) for i in layers),
                flops_per_pair=4 * model.num_heads * sum(kv.heads[i].head_dim for i in layers),
                held_bytes_per_token=None if own == layers else held,
            )
        )
    return tuple(groups)


def of_ranks(
    info: ModelInfo, whole: ModelConfig, *, tensor_size: int, num_stages: int = 1
) -> ModelInfo:
    """info: of one rank's part of a model. What a device reads and computes stays that part's."""
    return replace(
        info,
        vocab_size=whole.vocab_size,
        num_parameters=whole.num_parameters,
        tensor_parallel_size=tensor_size,
        pipeline_parallel_size=num_stages,
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
