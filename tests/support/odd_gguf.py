"""Odd checkpoints as GGUF files: settings that these cannot say are as llama.cpp has them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Type

from tests.support.gguf_files import write_gguf

Settings = dict[str, Any]
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
_WITHOUT_WINDOWS: Settings = {"use_sliding_window": False, "layer_types": None}
# What scalings have beside these, the metadata has no place for.
_OF_ROPE = (
    *("rope_type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "partial_rotary_factor", "llama_4_scaling_beta"),
    *("short_factor", "long_factor"),
)


def _one_rope(settings: Settings) -> Settings:
    """Those whose scaling cannot be said have none."""
    rope = {name: value for name, value in settings["rope_parameters"].items() if name in _OF_ROPE}
    kind = rope["rope_type"]
    if kind == "longrope" and "original_max_position_embeddings" in settings:  # Phi's
        rope.pop("factor", None)
    elif kind in ("dynamic", "proportional", "longrope"):
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return settings | {"rope_parameters": rope}


def _ropes_by_kind(settings: Settings, *, has_two_bases: bool) -> Settings:
    """Layers with a window are never scaled. has_two_bases: or all have the same."""
    full, sliding = settings["rope_parameters"][FULL], settings["rope_parameters"][SLIDING]
    full = _one_rope({"rope_parameters": full})["rope_parameters"]
    if full["rope_type"] == "llama3":  # the factors of which would be those of all layers
        full = {"rope_type": "default", "rope_theta": full["rope_theta"]}
    theta = sliding["rope_theta"] if has_two_bases else full["rope_theta"]
    ropes = {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": theta}}
    return settings | {"rope_parameters": ropes}


def _qwen2(settings: Settings) -> Settings:
    return _one_rope(settings) | _WITHOUT_WINDOWS


def _mixture(settings: Settings, *, is_normed: bool) -> Settings:
    found = _qwen2(settings) | {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return found | {"norm_topk_prob": is_normed}


def _smollm3(settings: Settings) -> Settings:
    return _one_rope(settings) | _WITHOUT_WINDOWS | {"no_rope_layers": None}


def _ministral3(settings: Settings) -> Settings:
    found = _one_rope(settings) | {"sliding_window": None}
    found["rope_parameters"] |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    return found


def _mistral_small(settings: Settings) -> Settings:
    return _one_rope(settings) | {"sliding_window": None}


def _olmo3(settings: Settings) -> Settings:
    return _ropes_by_kind(settings, has_two_bases=False)


def _gemma3(settings: Settings) -> Settings:
    """Each sixth layer has no window."""
    found = _ropes_by_kind(settings, has_two_bases=True)
    count = 4 + found["num_hidden_layers"]
    kinds = [FULL if (n + 1) % 6 == 0 else SLIDING for n in range(count)]
    own = {"num_hidden_layers": count, "layer_types": kinds}
    return found | own | {"query_pre_attn_scalar": settings["head_dim"]}


def _gpt_oss(settings: Settings) -> Settings:
    found = _one_rope(settings) | {"swiglu_limit": 7.0}
    if found["rope_parameters"]["rope_type"] == "yarn":
        found["rope_parameters"]["truncate"] = False
    kinds = [SLIDING, FULL] * found["num_hidden_layers"]
    return found | {"layer_types": kinds[: found["num_hidden_layers"]]}


def _gemma4(settings: Settings) -> Settings:
    ropes = settings["rope_parameters"]
    share = ropes[FULL].get("partial_rotary_factor", 0.5)
    theta, local = ropes[FULL]["rope_theta"], ropes[SLIDING]["rope_theta"]
    full = {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": share}
    sliding = {"rope_type": "default", "rope_theta": local}
    return settings | {"rope_parameters": {FULL: full, SLIDING: sliding}}


def _qwen3_5(settings: Settings) -> Settings:
    """Each how many-th layer has attention."""
    interval = settings["layer_types"].index(FULL) + 1
    kinds = [FULL if (n + 1) % interval == 0 else LINEAR for n in range(2 * interval)]
    return _one_rope(settings) | {"layer_types": kinds, "num_hidden_layers": len(kinds)}


def _latent(settings: Settings) -> Settings:
    """Neighbours are rotated together, without biases, and one factor is of angles and scores."""
    given, found = settings["rope_parameters"], _one_rope(settings) | {"attention_bias": False}
    if "mscale_all_dim" in given:
        factor = given["mscale_all_dim"]
        found["rope_parameters"] |= {"mscale": factor, "mscale_all_dim": factor}
    return found | ({"rope_interleave": True} if "rope_interleave" in settings else {})


def _deepseek_v2(settings: Settings) -> Settings:
    return _latent(settings) | {"topk_method": "group_limited_greedy"}


def _glm4_moe_lite(settings: Settings) -> Settings:
    """Experts are in the last layers, and in one at least."""
    kinds = sorted(settings["mlp_layer_types"][:-1])
    return _latent(settings) | {"mlp_layer_types": [*kinds, "sparse"]}


# By the families of `tests.support.odd_models`.
GGUF_FAMILIES: dict[str, Callable[[Settings], Settings]] = {
    "llama2": _one_rope,
    "mistral_window": _one_rope,
    "qwen2": _qwen2,
    "qwen3": _qwen2,
    "qwen2_moe": lambda settings: _mixture(settings, is_normed=False),
    "qwen3_moe": lambda settings: _mixture(settings, is_normed=True),
    "phi4_mini": _one_rope,
    "smollm3": _smollm3,
    "ministral3": _ministral3,
    "ministral3_wrapped": _ministral3,
    "mistral_small_wrapped": _mistral_small,
    "granite": _one_rope,
    "olmo2": _one_rope,
    "olmo3": _olmo3,
    "seed_oss": _one_rope,
    "exaone4": _one_rope,
    "gemma3": _gemma3,
    "gemma3_wrapped": _gemma3,
    "gpt_oss": _gpt_oss,
    "gemma4": _gemma4,
    "gemma4_moe": _gemma4,
    "gemma4_small_wrapped": _gemma4,
    "gemma4_unified_wrapped": _gemma4,
    "glm4_moe": dict,
    "youtu": _latent,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _latent,
    "glm4_moe_lite": _glm4_moe_lite,
    "qwen3_5": _qwen3_5,
    "qwen3_5_wrapped": _qwen3_5,
    "qwen3_5_moe": _qwen3_5,
    "qwen3_5_moe_wrapped": _qwen3_5,
}
_DTYPES = {
    Type.F32: torch.float32,
    Type.F16: torch.float16,
    Type.BF16: torch.bfloat16,
}
TYPES = tuple(_DTYPES)


def round_matrices(model: Any, kind: Type) -> None:
    """To what a file of this type has of them."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.to(_DTYPES[kind]).float()


def write_odd_gguf(model: Any, directory: Path, kind: Type, eos_token_id: int) -> Path:
    """Beside its config.json."""
    path = directory / "model.gguf"
    metadata = {"tokenizer.ggml.eos_token_id": eos_token_id}
    return write_gguf(path, model, lambda _: kind, metadata=metadata)
