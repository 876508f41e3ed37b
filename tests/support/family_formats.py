"""A tiny model of each family whose layers fit the groups and blocks of quantized checkpoints."""

from pathlib import Path
from typing import Any

from tests.support.quantized_checkpoints import FORMATS, save_quantized
from tests.support.tiny_models import ALL_FAMILIES, make_model

# One of each form of codes: the others differ from one of these by names and scales alone, and are
# compared with one family by `tests/engine/models/formats`.
FORMS = ("fp8-block", "ct-w8a8", "ct-w4a16", "awq", "gptq4", "ct-nvfp4")
# One or more for each model_type.
IN_CODES = (
    *(
        "llama2",
        "mistral_no_window",
        "qwen2",
        "qwen3",
        "phi4",
        "phi4_mini",
        "smollm3",
        "ministral3",
    ),
    *("granite", "olmo2", "olmo3", "seed_oss", "cwm", "exaone4", "gemma3", "gemma4"),
    *("gemma4_moe", "gemma4_small_wrapped", "gemma4_unified_wrapped", "qwen3_vl"),
    *("qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "gpt_oss", "glm4_moe_groups", "qwen3_5"),
    *("qwen3_5_moe", "youtu", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite"),
    "mistral4",
)
# Of these, experts are plain here: gpt-oss's own MXFP4 has tests of its own.
PLAIN_EXPERTS = ("gpt_oss",)
# As published checkpoints leave them: the output layer, routers, gates, encoders, inputs by layer.
_PLAIN = (
    *("lm_head", "router", "shared_expert_gate", "in_proj_a", "in_proj_b"),
    *("vision", "visual", "multi_modal", "per_layer"),
)
_SIZES = {
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_num_value_heads": 8,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}


def save_in_codes(family: str, form: str, path: Path) -> Any:
    """Returns transformers' model with the values of the codes that the checkpoint has."""
    _, own = ALL_FAMILIES[family]
    sizes = {key: size for key, size in _SIZES.items() if own.get(key) is not None}
    if "kv_lora_rank" not in own and family != "phi4_mini":
        sizes["head_dim"] = 32
    model = make_model(family, **{"intermediate_size": 128, **sizes})
    has_experts = "moe_intermediate_size" in own and family not in PLAIN_EXPERTS
    return save_quantized(model, path, FORMATS[form], _PLAIN, has_experts=has_experts)
