"""The families with DeepSeek's layers: latent attention, and mixtures with groups and corrections.

Source: transformers' classes with these names. Imports no tensors.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from penstock.engine.files.json_file import Fields
from penstock.engine.models.families.outline import Design, Family
from penstock.engine.models.parts.attention.rope import RopeSettings
from penstock.engine.models.parts.experts.config import deepseek_experts, deepseek_layers
from penstock.engine.models.parts.latent_attention.config import read_latent_attention

_LATENT_DEFAULTS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_DEEPSEEK_V2_DEFAULTS = {
    **_LATENT_DEFAULTS,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "topk_method": "greedy",
}
_DEEPSEEK_V3_DEFAULTS = {
    **_LATENT_DEFAULTS,
    "num_experts_per_tok": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}
_GLM4_LITE_DEFAULTS = {
    **_LATENT_DEFAULTS,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 4,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
}
_MISTRAL4_DEFAULTS = {
    **_LATENT_DEFAULTS,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "num_experts_per_tok": 4,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
}
# How training balanced experts, and how they were divided.
_OF_TRAINING = frozenset({"aux_loss_alpha", "seq_aux", "ep_size"})


def with_experts(fields: Fields, design: Design, **kind: Any) -> Design:
    """Layers with DeepSeek's experts behind some with an MLP. kind: see `deepseek_experts`."""
    experts = deepseek_experts(fields, **kind)
    return replace(design, experts=experts, have_experts=deepseek_layers(fields))


def _latent(fields: Fields, design: Design) -> Design:
    attention = read_latent_attention(fields)
    return replace(design, mixers=(attention,) * fields.count("num_hidden_layers"))


def _latent_mixture(fields: Fields, design: Design, **kind: Any) -> Design:
    """kind: see `deepseek_experts`."""
    return with_experts(fields, _latent(fields, design), **kind)


def _glm4_moe_lite(fields: Fields, design: Design) -> Design:
    design = _latent_mixture(fields, design)
    return replace(design, have_experts=deepseek_layers(fields, 1))


def _mistral4(fields: Fields, design: Design) -> Design:
    """What config.json says of the share of a head that is rotated must be what its sizes say."""
    if not (fields.mapping("rope_parameters") or fields.mapping("rope_scaling")):
        raise fields.wrong("rope_parameters", "an object with its scaling", None)
    sizes = [fields.count(f"qk_{name}_head_dim") for name in ("rope", "nope")]
    share = RopeSettings(fields).share_of_head(sizes[0] / sum(sizes))
    if int(share * sum(sizes)) != sizes[0]:
        raise fields.wrong("partial_rotary_factor", f"{sizes[0] / sum(sizes):g}", share)
    return _latent_mixture(fields, design, has_sigmoids=False)


# Those with DeepSeek's attention; with dense MLPs it is Youtu-LLM's.
_LATENT = Family(
    architecture="YoutuForCausalLM",
    design=Design(attention_flags={}, mlp_flags={}),
    read=_latent,
    head_dim_key="qk_rope_head_dim",
    defaults=_LATENT_DEFAULTS,
    # The first two follow from others; the last is of random weights.
    without_effect=frozenset({"head_dim", "qk_head_dim", "embedding_initializer_range"}),
)
# By model_type.
FAMILIES = {
    "deepseek_v2": replace(
        _LATENT,
        architecture="DeepseekV2ForCausalLM",
        read=partial(_latent_mixture, has_sigmoids=False, num_best=1),
        defaults=_DEEPSEEK_V2_DEFAULTS,
        without_effect=_LATENT.without_effect | _OF_TRAINING,
    ),
    "deepseek_v3": replace(
        _LATENT,
        architecture="DeepseekV3ForCausalLM",
        read=_latent_mixture,
        defaults=_DEEPSEEK_V3_DEFAULTS,
        without_effect=_LATENT.without_effect | _OF_TRAINING,
    ),
    "glm4_moe_lite": replace(
        _LATENT,
        architecture="Glm4MoeLiteForCausalLM",
        read=_glm4_moe_lite,
        defaults=_GLM4_LITE_DEFAULTS,
    ),
    "mistral4": replace(
        _LATENT,
        architecture="Mistral4ForCausalLM",
        read=_mistral4,
        defaults=_MISTRAL4_DEFAULTS,
        computes=frozenset({"partial_rotary_factor", "llama_4_scaling_beta"}),
    ),
    "youtu": replace(_LATENT, defaults={**_LATENT_DEFAULTS, "tie_word_embeddings": True}),
}
