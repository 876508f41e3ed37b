"""What llama.cpp's converter changes in mixtures of experts and in Qwen3.5, before it writes them.

Source: conversion/qwen.py and conversion/gpt_oss.py of llama.cpp.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

Values = NDArray[np.float32]
HYBRIDS = ("qwen35", "qwen35moe")  # in llama.cpp's words
_HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text")
_MIXTURES = ("qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "gpt_oss")


def converted(config: Any, name: str, values: Values) -> Iterator[tuple[str, Values]]:
    """Yields the tensors that one of transformers becomes, with names that the package knows."""
    if config.model_type in _HYBRIDS:
        name, values = _hybrid(config, name, values)
    elif config.model_type == "gpt_oss":
        if "experts" in name and not name.endswith("_bias"):
            values = values.swapaxes(1, 2)
        if name.endswith("sinks"):
            name += ".weight"
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
        num_experts = config.num_local_experts if kind == "gpt_oss" else config.num_experts
        size = config.intermediate_size if kind == "gpt_oss" else config.moe_intermediate_size
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(size)
    if shared_size := getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(shared_size)
    if kind == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
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
