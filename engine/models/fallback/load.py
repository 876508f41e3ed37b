"""A class of transformers with its settings and weights, from a model's directory, and what a step
must read and compute of these.

Weights come from safetensors, and no code of a model's directory is run.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from penstock.engine.config import LoadFormat
from penstock.engine.files.json_file import Fields
from penstock.engine.files.tensor_files import PLAIN_DTYPES, TensorFiles, is_finite
from penstock.engine.models.config import eos_token_ids
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.fallback.source import (
    TransformersClass,
    UnsupportedClass,
    calling,
    check_kinds,
    find_class,
)
from penstock.engine.step.model_info import RoutedExperts

logger = logging.getLogger(__name__)

# Settings of rotary positions that depend on the longest sequence of a step: keys that are in the
# pool would not fit those that come later.
_CHANGING_ROPES = ("dynamic", "longrope", "su")
_SHOWN_NAMES = 3
_EXPERT = re.compile(r"\.experts\.\d+\.")
# These settings of transformers say how many experts each token is routed to.
_NUM_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """Describes a model that transformers computes to the rest of the program. settings: the
    class's own."""

    family: str
    architecture: str
    settings: Any
    vocab_size: int
    hidden_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_dir(cls, model_dir: Path) -> "TransformersConfig":
        """Raises InvalidModel."""
        fields = Fields.read(model_dir / "config.json")
        served = find_class(fields)
        if served is None:
            raise InvalidModel(
                f"{fields.path} names no decoder of the installed transformers "
                f"({transformers.__version__})",
                brief="transformers has no class for it",
            )
        settings = _settings(served, fields)
        # Where config.json does not say it, the class has a default.
        check_kinds(served, getattr(settings, "layer_types", None))

        def size(name: str) -> int:
            return Fields(fields.path, {name: getattr(settings, name, None)}).count(name)

        vocab_size = size("vocab_size")
        return cls(
            family=served.family,
            architecture=served.architecture,
            settings=settings,
            vocab_size=vocab_size,
            hidden_size=size("hidden_size"),
            max_model_len=size("max_position_embeddings"),
            eos_token_ids=eos_token_ids(fields, model_dir / "generation_config.json", vocab_size),
        )


def check_ropes(config: TransformersConfig, max_model_len: int) -> None:
    """Raises InvalidModel where positions are rotated by the longest sequence of a step."""
    for rope in _ropes(getattr(config.settings, "rope_parameters", None)):
        kind = rope.get("rope_type") or rope.get("type")
        trained = rope.get("original_max_position_embeddings") or config.max_model_len
        if kind in _CHANGING_ROPES and max_model_len > trained:
            raise UnsupportedClass(
                config.architecture,
                f"its rotary positions ({kind}) change with the longest sequence, beyond {trained} "
                f"tokens; use --max-model-len {trained}",
            )


def load_network(
    config: TransformersConfig,
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat,
) -> Any:
    """transformers' model, in evaluation mode. Raises InvalidModel."""
    made_by: Any = getattr(transformers, config.architecture)
    if load_format is LoadFormat.DUMMY:
        torch.manual_seed(0)
        return made_by._from_config(config.settings, dtype=dtype).eval().to(device)
    logs: Any = transformers.logging
    logs.disable_progress_bar()
    logs.set_verbosity_error()
    _check_tensors(model_dir)
    with calling(config.architecture, f"cannot read the weights in {model_dir}"):
        network, loaded = made_by.from_pretrained(
            model_dir,
            config=config.settings,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
        )
    _check_names(config.architecture, model_dir, loaded)
    for name, parameter in network.named_parameters():
        if not is_finite(parameter.data):
            raise InvalidModel(
                f"the weight {name!r} in {model_dir} is not finite in {parameter.dtype}; use "
                "another --dtype, or download the model again"
            )
    # Torch's grouped products, which transformers prefers, take rows of whole 16 bytes alone.
    stacks = [each for each in network.parameters() if each.dim() == 3]
    if any(size * each.itemsize % 16 for each in stacks for size in each.shape[1:]):
        network.set_experts_implementation("eager")
    return network.eval().to(device)


def _check_tensors(model_dir: Path) -> None:
    """Raises InvalidModel for weights that are codes, which transformers would take for numbers
    where config.json does not say that they are quantized, and for experts of unlike shapes, which
    it would not name."""
    files = TensorFiles(model_dir)
    shapes: dict[str, torch.Size] = {}
    for name in files.names:
        tensor = files.get(name)
        if name.endswith(".weight") and tensor.dtype not in PLAIN_DTYPES:
            allowed = "only float32, float16 and bfloat16 weights are supported"
            raise files.wrong_dtype(name, tensor, allowed)
        shape = shapes.setdefault(_EXPERT.sub(".experts.", name), tensor.shape)
        if tensor.shape != shape:
            raise InvalidModel(
                f"the tensor {name!r} in {model_dir} has the shape {tuple(tensor.shape)}, and that "
                f"of another expert {tuple(shape)}; download the model again"
            )


def _check_names(architecture: str, model_dir: Path, loaded: Mapping[str, Any]) -> None:
    """Raises InvalidModel for missing weights. loaded: what transformers says of all names."""
    missing = sorted(loaded["missing_keys"]) + [name for name, *_ in loaded["mismatched_keys"]]
    if missing:
        raise InvalidModel(
            f"the safetensors in {model_dir} lack weights of {architecture}, or have them in other "
            f"shapes: {_some(missing)}; download the model again",
            brief=f"{len(missing)} of its weights are missing",
        )
    if unexpected := sorted(loaded["unexpected_keys"]):
        message = "transformers' class %s does not read these weights: %s"
        logger.warning(message, architecture, _some(unexpected))


def _settings(served: TransformersClass, fields: Fields) -> Any:
    settings_class = getattr(transformers, served.architecture).config_class
    try:
        return settings_class.from_dict(fields.content)
    except Exception as error:  # its validation raises errors of several kinds
        reason = " ".join(str(error).split())[:300]
        raise InvalidModel(
            f"{fields.path} is not valid for {settings_class.__name__} of transformers: {reason!r}"
        ) from error


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """The settings of rotary positions: of all layers, or of each kind of them."""
    if isinstance(parameters, Mapping):
        yield parameters
        for each in parameters.values():
            yield from _ropes(each)


def _some(names: list[str]) -> str:
    more = f", and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCount:
    """num_bytes: of all. step_bytes, experts, flops_per_token: as in `ModelInfo`; where it is not
    known how many experts a token is routed to, step_bytes has all of them."""

    num_parameters: int
    num_bytes: int
    step_bytes: int
    flops_per_token: int
    experts: RoutedExperts | None

    @classmethod
    def of(cls, network: Any) -> "WeightCount":
        """network: transformers' model."""
        parameters = list(network.parameters())
        gathered, output = network.get_input_embeddings(), network.get_output_embeddings()
        num_bytes = sum(each.nbytes for each in parameters)
        step_bytes = num_bytes
        tables = {id(gathered.weight)}
        if output is not None:
            tables.add(id(output.weight))
        if output is None or output.weight is not gathered.weight:
            step_bytes -= gathered.weight.nbytes
        experts, num_expert_weights = _experts(network)
        matrices = sum(
            each.numel() for each in parameters if each.dim() > 1 and id(each) not in tables
        )
        if experts is not None:
            step_bytes -= experts.num_layers * experts.num_experts * experts.expert_bytes
            share = experts.num_experts_per_token / experts.num_experts
            matrices -= int(num_expert_weights * (1 - share))
        return cls(
            num_parameters=sum(each.numel() for each in parameters),
            num_bytes=num_bytes,
            step_bytes=step_bytes,
            flops_per_token=2 * matrices,
            experts=experts,
        )


def _experts(network: Any) -> tuple[RoutedExperts | None, int]:
    """And how many weights all of them have."""
    layers = [own for module in network.modules() if (own := _stacked(module))]
    chosen = next((n for name in _NUM_CHOSEN if (n := getattr(network.config, name, None))), None)
    sizes = {(len(own[0]), sum(each.nbytes for each in own)) for own in layers}
    # Layers that differ would need more than one record.
    if not isinstance(chosen, int) or len(sizes) != 1:
        return None, 0
    ((num_experts, num_bytes),) = sizes
    experts = RoutedExperts(
        num_layers=len(layers),
        num_experts=num_experts,
        num_experts_per_token=chosen,
        expert_bytes=num_bytes // num_experts,
    )
    return experts, sum(each.numel() for own in layers for each in own)


def _stacked(module: nn.Module) -> list[nn.Parameter]:
    """A layer's experts, where all are in the same tensors, by their first dimension."""
    num_experts = getattr(module, "num_experts", None)
    own = [each for each in module.parameters(recurse=False) if each.dim() > 1]
    is_stacked = any(each.dim() == 3 for each in own)
    return own if is_stacked and all(len(each) == num_experts for each in own) else []
