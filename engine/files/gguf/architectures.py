"""The architectures of GGUF files that are read: a row each says of which family they are, and in
what their metadata and tensors are not as those of most.

One more architecture of a family that is served is one more row here, where the parts of its layers
declare what GGUF calls their tensors. Source: llama.cpp's conversion/*.py, which writes the files,
and src/models/*.cpp, which reads them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.engine.files.gguf.keys import Keys, quotient
from penstock.engine.files.gguf.rope import FULL, SLIDING, proportional, ropes_by_kind

Settings = dict[str, Any]


def _nothing_else(keys: Keys, config: Settings) -> Settings:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """family: its model_type in config.json. read: returns what config.json has beside, or in place
    of, what all have; config: the latter. is_permuted: llama.cpp rotates pairs of neighbours, so
    the rows of each head of queries and keys have another order. rotates_parts: of a head, in some
    models. tiles_heads: the first value head of each key head of a delta net comes first, then the
    second of each, and so on. has_latents: the metadata's sizes of heads may be those of latents.
    renamed: kinds of tensors that it names in another way than others. unused: tensors, as a
    regular expression, that have no effect.
    """

    family: str
    read: Callable[[Keys, Settings], Settings] = _nothing_else
    is_permuted: bool = False
    rotates_parts: bool = False
    tiles_heads: bool = False
    has_latents: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    unused: str = ""


def _windows(keys: Keys, period: int) -> Settings:
    """Returns the kind of each layer. period: every which layer has no window, where the file does
    not say it; it gives that, or says of each layer whether it has one."""
    window, num_layers = keys.get("attention.sliding_window"), keys.num_layers
    if not window:
        return {"layer_types": [FULL] * num_layers}
    pattern = keys.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        have_windows = keys.by_layer("attention.sliding_window_pattern")
    elif isinstance(pattern, int) and pattern > 0:
        have_windows = [(index + 1) % pattern != 0 for index in range(num_layers)]
    else:
        raise keys.wrong(f"the pattern {pattern!r:.40} of layers with a window")
    kinds = [SLIDING if each else FULL for each in have_windows]
    return {"sliding_window": window, "layer_types": kinds}


def _llama(keys: Keys, config: Settings) -> Settings:
    window = keys.get("attention.sliding_window")
    return {"model_type": "mistral", "sliding_window": window} if window else {}


def _mistral3(keys: Keys, config: Settings) -> Settings:
    """Ministral 3, or Mistral Small 3.1 and 3.2, whose text model is a Mistral without a window."""
    scale = keys.get("attention.temperature_scale")
    if not scale:
        return {"sliding_window": None}
    rope = {**config["rope_parameters"], "llama_4_scaling_beta": scale}
    return {"model_type": "ministral3", "sliding_window": None, "rope_parameters": rope}


def _phi3(keys: Keys, config: Settings) -> Settings:
    return {"sliding_window": keys.get("attention.sliding_window") or None}  # 0 for none


def _granite(keys: Keys, config: Settings) -> Settings:
    if not keys.get("rope.scaling.finetuned", True):
        raise keys.wrong("layers without rotary positions, which are not supported in Granite")
    return {}


def _olmo2(keys: Keys, config: Settings) -> Settings:
    """OLMo 2, or 3, which has windows."""
    windows = _windows(keys, 4)
    if "sliding_window" not in windows:
        return {}
    return {"model_type": "olmo3", "rope_parameters": ropes_by_kind(keys), **windows}


def _seed_oss(keys: Keys, config: Settings) -> Settings:
    return {"attention_out_bias": keys.has("blk.0.attn_output.bias")}


def _exaone4(keys: Keys, config: Settings) -> Settings:
    return {"sliding_window": None, **_windows(keys, 4)}


def _gemma3(keys: Keys, config: Settings) -> Settings:
    """The file does not say what scores are divided by; llama.cpp knows the 27B by its layers."""
    is_27b = keys.num_layers == 62
    per_head = quotient(config["hidden_size"], config["num_attention_heads"])
    return {
        "query_pre_attn_scalar": per_head if is_27b else config["head_dim"],
        "rope_parameters": ropes_by_kind(keys, 10_000.0),
        **_windows(keys, 6),
    }


def _gemma4(keys: Keys, config: Settings) -> Settings:
    if not keys.num_layers:
        return {}
    windows = _windows(keys, 6)
    heads, sizes = keys.by_layer("attention.head_count_kv"), keys.by_layer("feed_forward_length")
    kinds = [*windows["layer_types"][:-1], FULL]  # as transformers: the last has no window
    full = [index for index, kind in enumerate(kinds) if kind == FULL]
    of_full = {"head_dim": config["head_dim"], "num_key_value_heads": heads[full[0]]}
    table = keys.gguf.tensors.get("per_layer_token_embd.weight")
    found = {
        **windows,
        "head_dim": keys.get("attention.key_length_swa"),
        "num_key_value_heads": heads[kinds.index(SLIDING)] if SLIDING in kinds else heads[0],
        "per_layer_config": {str(index): of_full for index in full},
        "attention_k_eq_v": not keys.has(f"blk.{full[0]}.attn_v.weight"),
        "num_kv_shared_layers": keys.get("attention.shared_kv_layers", 0),
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": len(set(sizes)) > 1,
        "hidden_size_per_layer_input": keys.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": table.shape[0] if table else None,
        "rope_parameters": {**ropes_by_kind(keys, 10_000.0), FULL: proportional(keys)},
    }
    if keys.get("expert_count"):
        found["enable_moe_block"] = True
        found["top_k_experts"] = keys.get("expert_used_count")
        found["moe_intermediate_size"] = keys.get("expert_feed_forward_length")
    return found


def _experts(keys: Keys) -> Settings:
    return {
        "num_experts_per_tok": keys.get("expert_used_count"),
        "moe_intermediate_size": keys.get("expert_feed_forward_length"),
    }


def _shared_expert(keys: Keys) -> Settings:
    return {"shared_expert_intermediate_size": keys.get("expert_shared_feed_forward_length")}


def _qwen2moe(keys: Keys, config: Settings) -> Settings:
    biases = {"qkv_bias": config["attention_bias"], "attention_bias": False}
    return {**_experts(keys), **_shared_expert(keys), **biases}


def _qwen3moe(keys: Keys, config: Settings) -> Settings:
    return {**_experts(keys), "norm_topk_prob": True}


def _qwen35(keys: Keys, config: Settings) -> Settings:
    num_heads = keys.get("ssm.time_step_rank")
    return {
        **_without_drafting(keys),
        "full_attention_interval": keys.get("full_attention_interval"),
        "linear_conv_kernel_dim": keys.get("ssm.conv_kernel"),
        "linear_key_head_dim": keys.get("ssm.state_size"),
        "linear_value_head_dim": quotient(keys.get("ssm.inner_size"), num_heads),
        "linear_num_key_heads": keys.get("ssm.group_count"),
        "linear_num_value_heads": num_heads,
    }


def num_drafting(keys: Keys) -> int:
    """Returns how many layers, the last of the file, only draft."""
    number = keys.get("nextn_predict_layers", 0)
    return number if isinstance(number, int) and 0 <= number < keys.num_layers else 0


def _without_drafting(keys: Keys) -> Settings:
    """The last layers of the file may be those that draft, which are not the model's."""
    return {"num_hidden_layers": keys.num_layers - num_drafting(keys) or None}


def _qwen35moe(keys: Keys, config: Settings) -> Settings:
    return {**_qwen35(keys, config), **_experts(keys), **_shared_expert(keys)}


def _gpt_oss(keys: Keys, config: Settings) -> Settings:
    experts = _experts(keys)
    rope = config["rope_parameters"]
    return {
        "sliding_window": keys.get("attention.sliding_window"),
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "intermediate_size": experts["moe_intermediate_size"],
        "rope_parameters": {**rope, **({"truncate": False} if rope["rope_type"] == "yarn" else {})},
    }


# By expert_gating_func, which older files do not have.
_SCORES = {"None": None, "1": "softmax", "2": "sigmoid"}


def _routed(keys: Keys) -> Settings:
    """Returns the settings of DeepSeek's experts."""
    scores = str(keys.get("expert_gating_func"))
    return {
        **_experts(keys),
        "num_experts": None,
        "n_routed_experts": keys.get("expert_count"),
        "n_shared_experts": keys.get("expert_shared_count"),
        "first_k_dense_replace": keys.get("leading_dense_block_count"),
        "routed_scaling_factor": keys.get("expert_weights_scale") or None,  # 0 for none
        "norm_topk_prob": keys.get("expert_weights_norm"),
        "scoring_func": _SCORES.get(scores, scores),
        "topk_method": None,  # by groups, where there are several
        "n_group": keys.get("expert_group_count"),
        "topk_group": keys.get("expert_group_used_count"),
    }


def _glm4moe(keys: Keys, config: Settings) -> Settings:
    has_norms = keys.has("blk.0.attn_q_norm.weight")
    return {**_routed(keys), **_without_drafting(keys), "use_qk_norm": has_norms}


def _deepseek2(keys: Keys, config: Settings) -> Settings:
    """DeepSeek-V3 and those like it, V2, or one without experts. In older files the sizes of
    heads are where newer ones have those of latents."""
    rope_dim, is_v3 = keys.get("rope.dimension_count"), _has_sigmoids(keys)
    key_dim = keys.get("attention.key_length_mla", keys.get("attention.key_length"))
    have_sizes = isinstance(key_dim, int) and isinstance(rope_dim, int)
    found = {
        **_without_drafting(keys),
        "head_dim": None,
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "kv_lora_rank": keys.get("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_dim - rope_dim if have_sizes else None,
        "v_head_dim": keys.get("attention.value_length_mla", keys.get("attention.value_length")),
        "rope_parameters": _latent_rope(keys, config["rope_parameters"]),
    }
    if keys.get("expert_count"):
        found |= {**_routed(keys), "model_type": "deepseek_v3" if is_v3 else "deepseek_v2"}
    return found


def _has_sigmoids(keys: Keys) -> bool:
    """Where the file does not say it, those that have corrections have them."""
    given = keys.get("expert_gating_func")
    corrections = (name.endswith(".exp_probs_b.bias") for name in keys.gguf.tensors)
    return any(corrections) if given is None else _SCORES.get(str(given)) == "sigmoid"


def _latent_rope(keys: Keys, rope: Settings) -> Settings:
    """The file has a tenth of DeepSeek's factor, which is that of angles and of scores."""
    if "mscale" in rope:
        factor = 10 * keys.get("rope.scaling.yarn_log_multiplier")
        rope = {**rope, "mscale": factor, "mscale_all_dim": factor}
    return {**rope, "llama_4_scaling_beta": keys.get("attention.temperature_scale")}


# As transformers has the norm before the MLP, though its name says what it comes after.
_NORM_BEFORE_MLP = {"ffn_norm": "post_attention_norm"}
_QWEN35 = Architecture(
    family="qwen3_5_text",
    read=_qwen35,
    rotates_parts=True,
    tiles_heads=True,
    renamed=_NORM_BEFORE_MLP,
)
# By general.architecture.
ARCHITECTURES = {
    "llama": Architecture(family="llama", read=_llama, is_permuted=True),
    "mistral3": Architecture(family="mistral", read=_mistral3, is_permuted=True),
    "qwen2": Architecture(family="qwen2"),
    "qwen3": Architecture(family="qwen3"),
    "qwen2moe": Architecture(family="qwen2_moe", read=_qwen2moe),
    "qwen3moe": Architecture(family="qwen3_moe", read=_qwen3moe),
    "qwen35": _QWEN35,
    "qwen35moe": replace(_QWEN35, family="qwen3_5_moe_text", read=_qwen35moe),
    "glm4moe": Architecture(
        family="glm4_moe", read=_glm4moe, rotates_parts=True, renamed=_NORM_BEFORE_MLP
    ),
    "deepseek2": Architecture(
        family="youtu",
        read=_deepseek2,
        has_latents=True,
        # Some files have these beside attn_kv_b, of which they are made.
        unused=r"blk\.\d+\.attn_(k|v)_b\.weight",
    ),
    "gpt-oss": Architecture(family="gpt_oss", read=_gpt_oss, renamed=_NORM_BEFORE_MLP),
    "phi3": Architecture(family="phi3", read=_phi3, rotates_parts=True),
    "smollm3": Architecture(family="smollm3", is_permuted=True),
    "granite": Architecture(family="granite", read=_granite, is_permuted=True),
    "olmo2": Architecture(family="olmo2", read=_olmo2),
    "seed_oss": Architecture(family="seed_oss", read=_seed_oss, renamed=_NORM_BEFORE_MLP),
    "exaone4": Architecture(family="exaone4", read=_exaone4),
    "gemma3": Architecture(family="gemma3_text", read=_gemma3),
    "gemma4": Architecture(
        family="gemma4_text",
        read=_gemma4,
        # Keys and values of layers that read those of another.
        unused=r"blk\.\d+\.attn_(k|v|k_norm)\.weight",
    ),
}
