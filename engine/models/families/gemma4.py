"""Reads Gemma 4's config.json as a `Design`. Imports no tensors.

Source: transformers' Gemma4TextConfig, and Gemma4UnifiedTextConfig of the 12B. Newer versions of it
write `per_layer_config` in place of the keys for layers of full attention.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from penstock.engine.files.json_file import Fields, shown_json
from penstock.engine.memory.pool.kv_shape import KVHeads
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.families.outline import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    Design,
    Ropes,
    check_heads,
    read_softcap,
    ropes_by_kind,
)
from penstock.engine.models.parts.attention.config import Attention
from penstock.engine.models.parts.attention.windows import FULL, SLIDING, Windows, full_every
from penstock.engine.models.parts.experts.config import MAX_WIDTH, Experts, read_experts
from penstock.engine.models.parts.layer import Layer
from penstock.engine.models.parts.mlp.config import Activation
from penstock.engine.models.parts.per_layer_inputs.config import PerLayerInputs

UNIFIED_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 262_144,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
}
DEFAULTS: Mapping[str, Any] = {
    **UNIFIED_DEFAULTS,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "use_bidirectional_attention": None,
}
# How the layers that differ are written, and read in Python.
WITHOUT_EFFECT = frozenset(
    {"serialize_explicit_per_layer_config", "allow_global_per_layer_attribute_access"}
)
_FULL_HEAD_DIM = 512
_PATTERN = 6
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def read(fields: Fields, design: Design) -> Design:
    """See `Family`."""
    if fields.text("use_bidirectional_attention") not in (None, "vision"):
        raise InvalidModel(
            f"{fields.path} has use_bidirectional_attention: "
            f"{shown_json(fields.get('use_bidirectional_attention'))}, so text tokens also attend "
            "to later ones, which is not supported; use a model with causal attention"
        )
    num_layers = fields.count("num_hidden_layers")
    return replace(
        design,
        by_layer=_by_layer(fields, num_layers),
        experts=_experts(fields),
        per_layer_inputs=_per_layer_inputs(fields, num_layers),
        embedding_multiplier=math.sqrt(fields.count("hidden_size")),
        logit_softcap=read_softcap(fields),
    )


def _by_layer(fields: Fields, num_layers: int) -> Callable[[int, Layer], Layer]:
    """Returns what layers of full attention have of their own, and those that share keys."""
    first_shared = num_layers - fields.count("num_kv_shared_layers", default=0, least=0)
    _check_sources(fields, num_layers, num_layers - first_shared)
    full: dict[str, Any] = {"has_values": not fields.flag("attention_k_eq_v")}
    if (heads := _full_heads(fields, num_layers)) is not None:
        full |= {"num_kv_heads": heads.num_kv_heads, "head_dim": heads.head_dim}
        full["kv_heads_key"] = "num_global_key_value_heads"
    are_wide = fields.flag("use_double_wide_mlp")
    has_spans = fields.text("use_bidirectional_attention") == "vision"

    def by_layer(index: int, layer: Layer) -> Layer:
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(attention, Attention) and mlp is not None, index
        if attention.window is None:
            attention = replace(attention, **full)
        else:
            attention = replace(attention, has_spans=has_spans)
        if index >= first_shared:
            attention = replace(attention, has_keys=False)
            mlp = replace(mlp, size=mlp.size * 2) if are_wide else mlp
        return replace(layer, mixer=attention, mlp=mlp)

    return by_layer


def windows(fields: Fields, num_layers: int) -> Windows:
    """Leaves the last layer without a window, whatever layer_types has: as transformers."""
    return (*full_every(_PATTERN, fields, num_layers)[:-1], None)


def ropes(fields: Fields, head_dim: int, windows: Windows) -> Ropes:
    """See `Family`. head_dim: of layers with a window."""
    if fields.get("rope_parameters") is None:
        fields = Fields(fields.path, {**fields.content, "rope_parameters": _ROPES})
    heads = _full_heads(fields, len(windows))
    full_head_dim = None if heads is None else heads.head_dim
    return ropes_by_kind(
        fields, head_dim, windows, local_theta=10_000.0, full_head_dim=full_head_dim
    )


def _check_sources(fields: Fields, num_layers: int, num_shared: int) -> None:
    """Raises InvalidModel where a layer would share keys and values that none has."""
    if not num_shared:
        return
    if num_shared >= num_layers:
        raise fields.wrong(
            "num_kv_shared_layers", f"less than {num_layers}, the layers", num_shared
        )
    kinds = [window is None for window in windows(fields, num_layers)]
    first = num_layers - num_shared
    if not set(kinds[first:]) <= set(kinds[:first]):
        raise InvalidModel(
            f"{fields.path}: num_kv_shared_layers is {num_shared}, and of the {first} layers "
            "before them none is of a kind that they have in layer_types, so there are no keys "
            "and values to share"
        )


def _full_heads(fields: Fields, num_layers: int) -> KVHeads | None:
    """Reads the heads of full attention's layers; None where they are as those of the others."""
    default = KVHeads(
        fields.count("num_key_value_heads", most=MAX_HEADS),
        fields.count("head_dim", most=MAX_HEAD_DIM),
    )
    content = fields.get("per_layer_config")
    if content is None:
        num = default.num_kv_heads
        if fields.flag("attention_k_eq_v"):
            num = fields.count("num_global_key_value_heads", default=num, most=MAX_HEADS)
        heads = KVHeads(num, fields.count("global_head_dim", _FULL_HEAD_DIM, most=MAX_HEAD_DIM))
    else:
        heads = _heads_by_layer(fields, num_layers, default)
    for key in ("global_head_dim", "num_global_key_value_heads"):  # without an effect, if unread
        fields.get(key)
    num_heads = fields.count("num_attention_heads")
    layers = "layers of full attention"
    kv_heads, head_dim = f"the KV heads of {layers}", f"{layers} have a head_dim of"
    check_heads(fields, num_heads, heads, kv_heads=kv_heads, head_dim=head_dim)
    return None if heads == default else heads


def _heads_by_layer(fields: Fields, num_layers: int, default: KVHeads) -> KVHeads:
    """From per_layer_config: by a layer's number, the keys in which it differs."""
    expected = {i for i, each in enumerate(windows(fields, num_layers)) if each is None}
    content = fields.mapping("per_layer_config")
    found = {}
    for name, of_layer in content.items():
        if not isinstance(of_layer, dict) or not set(of_layer) <= _KEYS_OF_LAYERS:
            raise fields.wrong(
                "per_layer_config", f"by layer, {' and '.join(sorted(_KEYS_OF_LAYERS))}", of_layer
            )
        own = Fields(f"{fields.path}: per_layer_config.{name}", of_layer)
        heads = KVHeads(
            own.count("num_key_value_heads", default=default.num_kv_heads, most=MAX_HEADS),
            own.count("head_dim", default=default.head_dim, most=MAX_HEAD_DIM),
        )
        if heads != default:  # some files list all layers
            found[name] = heads
    kinds = set(found.values())
    if not kinds:
        return default
    if len(kinds) > 1 or {int(n) if n.isdecimal() else -1 for n in found} != expected:
        raise InvalidModel(
            f"{fields.path}: per_layer_config must give all layers of full attention the same "
            f"heads, and no other layers any; these layers are {shown_json(sorted(expected))}"
        )
    return kinds.pop()


def _per_layer_inputs(fields: Fields, num_layers: int) -> PerLayerInputs | None:
    size = fields.count("hidden_size_per_layer_input", default=0, least=0, most=MAX_WIDTH)
    vocab_size = fields.count("vocab_size_per_layer_input", default=fields.count("vocab_size"))
    if not size:
        return None
    if vocab_size < fields.count("vocab_size"):
        raise InvalidModel(
            f"{fields.path}: vocab_size_per_layer_input ({vocab_size}) must be at least vocab_size "
            f"({fields.count('vocab_size')})"
        )
    return PerLayerInputs(
        hidden_size=fields.count("hidden_size"),
        num_layers=num_layers,
        size=size,
        vocab_size=vocab_size,
        pad_id=fields.count("pad_token_id", default=0, least=0, most=vocab_size - 1),
    )


def _experts(fields: Fields) -> Experts | None:
    keys = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not fields.flag("enable_moe_block"):
        for key in keys:  # without an effect
            fields.get(key)
        return None
    return read_experts(
        fields,
        is_normed=True,
        num_per_token="top_k_experts",
        router="router.proj",
        experts="experts",
        is_beside_mlp=True,
        activation=Activation(is_gelu=True),
    )


_KEYS_OF_LAYERS = frozenset({"head_dim", "num_key_value_heads"})
