"""What llama.cpp's converter changes in mixtures of experts, in Qwen3.5 and in latent attention,
before it writes them.

Source: conversion/qwen.py, gpt_oss.py, deepseek.py and glm.py of llama.cpp.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from gguf import ExpertGatingFuncType, GGUFWriter
from numpy.typing import NDArray

Values = NDArray[np.float32]
WITH_PARTS = ("qwen35", "qwen35moe", "glm4moe")  # of heads that are rotated, in llama.cpp's words
LATENTS = ("youtu", "deepseek_v2", "deepseek_v3", "glm4_moe_lite")
_OF_DEEPSEEK = (*LATENTS[1:], "glm4_moe")
_HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text")
_MIXTURES = ("qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "gpt_oss", *_OF_DEEPSEEK)


def converted(config: Any, name: str, values: Values) -> Iterator[tuple[str, Values]]:
    """Yields the tensors that one of transformers becomes, with names that the package knows."""
    if config.model_type in _HYBRIDS:
        name, values = _hybrid(config, name, values)
    elif config.model_type == "gpt_oss":
        if "experts" in name and not name.endswith("_bias"):
            values = values.swapaxes(1, 2)
        if name.endswith("sinks"):
            name += ".weight"
    elif name.endswith("kv_b_proj.weight"):
        heads = values.reshape(config.num_attention_heads, -1, values.shape[1])
        keys, of_values = np.split(heads, [config.qk_nope_head_dim], axis=1)
        yield name.replace("kv_b", "k_b"), np.ascontiguousarray(keys.swapaxes(1, 2))
        yield name.replace("kv_b", "v_b"), of_values
        return
    elif name.endswith("e_score_correction_bias"):
        name = name.replace("_bias", ".bias")
    experts, _, part = name.partition(".experts.")
    if not part or config.model_type not in _MIXTURES:
        yield name, values
        return
    kind = "bias" if part.endswith("_bias") else "weight"
    experts += ".experts"
    if part.startswith("down"):
        yield f"{experts}.down_proj.{kind}", values
    elif config.model_type == "gpt_oss":  # gate and up take turns
        yield f"{experts}.gate_proj.{kind}", values[:, ::2]
        yield f"{experts}.up_proj.{kind}", values[:, 1::2]
    else:
        half = values.shape[1] // 2
        yield f"{experts}.gate_proj.weight", values[:, :half]
        yield f"{experts}.up_proj.weight", values[:, half:]


def _hybrid(config: Any, name: str, values: Values) -> tuple[str, Values]:
    num_keys, num_values = config.linear_num_key_heads, config.linear_num_value_heads
    width, keys = config.linear_value_head_dim, 2 * num_keys * config.linear_key_head_dim

    def tiled(part: Values, width: int) -> Values:
        """The first value head of each key head, then the second of each, and so on."""
        heads = part.reshape(num_keys, num_values // num_keys, width, *part.shape[1:])
        return heads.swapaxes(0, 1).reshape(part.shape)

    if name.endswith("in_proj_qkv.weight"):
        values = np.concatenate([values[:keys], tiled(values[keys:], width)])
    elif name.endswith("conv1d.weight"):
        values = values.squeeze(1)
        values = np.concatenate([values[:keys], tiled(values[keys:], width)])
    elif name.endswith("in_proj_z.weight"):
        values = tiled(values, width)
    elif name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
        values = tiled(values, 1)
    elif name.endswith("out_proj.weight") and "linear_attn" in name:
        values = tiled(values.T, width).T
    elif name.endswith("A_log"):
        values = -np.exp(tiled(values, 1))
    elif name.endswith("dt_bias"):
        name, values = name.replace("dt_bias", "dt_proj.bias"), tiled(values, 1)
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        values = values + 1
    return name, np.ascontiguousarray(values)


def add_settings(writer: GGUFWriter, config: Any) -> None:
    """Those that dense models do not have."""
    kind = config.model_type
    if kind in _MIXTURES:
        settings = config.to_dict()
        names = ("num_local_experts", "n_routed_experts", "num_experts")
        num_experts = next(settings[name] for name in names if name in settings)
        size = config.intermediate_size if kind == "gpt_oss" else config.moe_intermediate_size
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(size)
    if shared_size := getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(shared_size)
    if kind == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
    if kind in LATENTS:
        _add_latents(writer, config)
    if kind in _OF_DEEPSEEK:
        _add_routing(writer, config)
    if kind == "glm4_moe":
        share = config.rope_parameters["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(config.head_dim * share))
    if kind in _HYBRIDS:
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(1 + config.layer_types.index("full_attention"))
        share = config.rope_parameters["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(config.head_dim * share))
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def _add_latents(writer: GGUFWriter, config: Any) -> None:
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if factor := config.rope_parameters.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * factor)


def _add_routing(writer: GGUFWriter, config: Any) -> None:
    kinds = getattr(config, "mlp_layer_types", None)
    writer.add_leading_dense_block_count(
        kinds.index("sparse") if kinds else config.first_k_dense_replace
    )
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    if config.n_group:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if config.model_type != "glm4_moe_lite":  # whose config.json does not name it
        has_softmax = config.model_type == "deepseek_v2"
        scores = ExpertGatingFuncType.SOFTMAX if has_softmax else ExpertGatingFuncType.SIGMOID
        writer.add_expert_gating_func(scores)
