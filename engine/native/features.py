"""Says which models the compiled step computes."""

from collections.abc import Iterator

import torch

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import UnsupportedFeature
from penstock.engine.models.parts.attention.config import Attention
from penstock.engine.models.parts.delta_net.config import DeltaNet
from penstock.engine.models.parts.experts.config import Experts
from penstock.engine.models.parts.latent_attention.config import LatentAttention
from penstock.engine.models.parts.mlp.config import MLP
from penstock.engine.models.parts.norm.config import Norms
from penstock.engine.models.parts.per_layer_inputs.config import PerLayerInput
from penstock.engine.models.parts.tensors import Part
from penstock.engine.native.packing import PATH

# The parts that it computes.
_PARTS = {Attention, LatentAttention, DeltaNet, MLP, Experts, Norms, PerLayerInput}
# coded_runs.h has room for so many codes of a head.
_MAX_CODED_HEAD_DIM = 1024


def check_features(config: ModelConfig, dtype: torch.dtype) -> None:
    """Raises UnsupportedFeature for a model that step.cpp does not compute."""
    config.check_parts(PATH, _lacks)
    for layer in config.layers:
        if layer.experts and layer.norms.post and not layer.experts.is_beside_mlp:
            raise UnsupportedFeature(["experts with post_norms"], PATH)
    if any(len(values) > 1 for values in _shared_settings(config)):
        raise UnsupportedFeature(["layers that differ in norms or activations"], PATH)
    odd = {name for name, size in _sizes(config) if size % 2}
    if odd and dtype is torch.bfloat16:
        raise UnsupportedFeature(odd, PATH)


def may_code_kv(config: ModelConfig) -> bool:
    """Returns whether keys and values of this model may be codes of 8 bits: see coded_runs.h."""
    head_dims = {heads.head_dim for heads in config.kv_shape.heads}
    return all(size % 4 == 0 and size <= _MAX_CODED_HEAD_DIM for size in head_dims)


def _lacks(part: Part) -> frozenset[str]:
    """Returns what of a part its C++ does not compute."""
    if isinstance(part, Attention) and part.has_gates and part.norms_whole:
        return frozenset({"attention_gates with whole_qk_norm"})
    if type(part) in _PARTS:
        return frozenset()
    return part.features or frozenset({type(part).__name__})


def _shared_settings(config: ModelConfig) -> Iterator[set[object]]:
    """Yields what step.cpp knows of the model alone, so that its layers must be alike in it."""
    yield {layer.norms.post for layer in config.layers}
    yield {(each.norms_whole, each.norms_values) for each in config.attentions}
    active = (part for layer in config.layers for part in (layer.mlp, layer.experts))
    activations = (part.activation for part in active if part is not None)
    yield {(each.is_gelu, each.is_exact) for each in activations}


def _sizes(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yields what an odd size is called that bfloat16's products need to be even, and the size."""
    yield "an odd hidden_size", config.hidden_size
    for layer in config.layers:
        if isinstance(layer.mixer, DeltaNet):
            yield "delta nets with an odd number of values", layer.mixer.num_values
        if isinstance(layer.mixer, LatentAttention):
            for name in ("latent_dim", "nope_dim", "value_dim", "query_rank"):
                yield f"latent attention with an odd {name}", getattr(layer.mixer, name)
        if layer.mlp is not None:
            yield "an odd intermediate_size", layer.mlp.size
        if layer.experts is not None:
            yield "experts of an odd size", layer.experts.size
            yield "a shared expert of an odd size", layer.experts.shared_size
    if config.per_layer_inputs is not None:
        yield "per-layer inputs of an odd size", config.per_layer_inputs.size
