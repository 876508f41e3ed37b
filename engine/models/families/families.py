"""The families of models that are served: a row each, with the design of its layers.

One more family is one more row here, if its layers are made of parts that there are. Source of all
facts: the classes of transformers with these names, which the tests compare with.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from penstock.engine.files.json_file import Fields, shown
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.families import gemma4
from penstock.engine.models.families.outline import (
    Design,
    Family,
    Head,
    Ropes,
    llama,
    one_rope,
)
from penstock.engine.models.families.unsupported import unsupported_family
from penstock.engine.models.parts.attention.config import HeadNorms
from penstock.engine.models.parts.attention.rope import RopeSettings
from penstock.engine.models.parts.attention.windows import (
    FULL,
    SLIDING,
    Windows,
    all_or_none,
    by_layer_types,
    every,
    mistral,
    no_window,
    qwen,
    unless_off,
)
from penstock.engine.models.parts.delta_net.config import read_delta_nets
from penstock.engine.models.parts.experts.config import MAX_WIDTH, qwen_layers, read_experts
from penstock.engine.models.parts.mlp.config import Activation
from penstock.engine.models.parts.tensors import NormKind

# ---- Qwen ---------------------------------------------------------------------------------------


def _qwen2(fields: Fields) -> Design:
    fields.get("attention_bias")  # its layers have these biases in any case
    return Design(attention={"qkv_bias": True}, mlp={"has_bias": fields.flag("mlp_bias")})


def _qwen3(fields: Fields) -> Design:
    return llama(fields).with_attention(head_norms=HeadNorms.EACH)


def _qwen3_moe(fields: Fields) -> Design:
    has_bias = fields.flag("attention_bias")
    return Design(
        attention={"qkv_bias": has_bias, "output_bias": has_bias, "head_norms": HeadNorms.EACH},
        experts=read_experts(
            fields,
            size=fields.count("moe_intermediate_size", most=MAX_WIDTH),
            is_normed=fields.flag("norm_topk_prob"),
        ),
        have_experts=qwen_layers(fields),
    )


def _qwen3_moe_windows(fields: Fields, num_layers: int) -> Windows:
    fields.get("max_window_layers")  # without an effect: all layers have the window
    return unless_off(fields, num_layers, [SLIDING] * num_layers)


_QWEN3_5 = {
    "vocab_size": 248_320,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


# Weights of norms are stored less 1, and multiplied in float32.
_OFFSET_NORM = NormKind(eps=0.0, is_wide=True, offset=1.0)
_QWEN3_5_ROPE = frozenset({"partial_rotary_factor"})
# These belong to the layer that drafts the token after the next.
_QWEN3_5_UNUSED = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})


def _qwen3_5(fields: Fields) -> Design:
    has_bias = fields.flag("attention_bias")
    if not fields.flag("attn_output_gate", default=True):
        raise fields.wrong("attn_output_gate", "true", False)
    # The type in which other programs keep the states; here it is float32.
    fields.get("mamba_ssm_dtype")
    return Design(
        attention={
            "qkv_bias": has_bias,
            "output_bias": has_bias,
            "head_norms": HeadNorms.EACH,
            "has_gates": True,
        },
        norm=_OFFSET_NORM,
        mixers=read_delta_nets(fields),
    )


def _qwen3_5_moe(fields: Fields) -> Design:
    experts = read_experts(
        fields,
        size=fields.count("moe_intermediate_size", most=MAX_WIDTH),
        is_normed=True,
        shared_size=fields.count("shared_expert_intermediate_size", least=0, most=MAX_WIDTH),
    )
    if experts is None:
        raise fields.wrong("num_experts", "a positive integer", 0)
    return replace(_qwen3_5(fields), experts=experts)


def _qwen3_5_rope(fields: Fields, head: Head) -> Ropes:
    """Positions of images and text have three numbers, which take turns in the pairs of a head as
    mrope_section says; those of a text are equal, so that it rotates as any other."""
    return _partial_rope(fields, head, 0.25)


def _every_layer(fields: Fields, num_layers: int) -> Windows:
    return (None,) * num_layers


# ---- Phi ----------------------------------------------------------------------------------------


def _phi3_rope(fields: Fields, head: Head) -> Ropes:
    # "su" and "yarn" are what the first Phi-3 called LongRoPE.
    return _partial_rope(fields, head, 1.0, {"su": "longrope", "yarn": "longrope"})


def _partial_rope(
    fields: Fields, head: Head, default: float, kinds: Mapping[str, str] = MappingProxyType({})
) -> Ropes:
    """default: of the share of a head that is rotated. kinds: see `RopeSettings`."""
    settings = RopeSettings(fields)
    rotary_dim = int(head.dim * settings.share_of_head(default))
    if rotary_dim % 2 or not 0 < rotary_dim <= head.dim:
        raise InvalidModel(
            f"{fields.path}: partial_rotary_factor rotates {rotary_dim} of a head's {head.dim} "
            "dimensions; it must be an even number of them"
        )
    rope = settings.for_all_layers(rotary_dim, kinds)
    attention = {} if rotary_dim == head.dim else {"rotary_dim": rotary_dim}
    return Ropes(rope=rope, attention=attention)


# ---- SmolLM -------------------------------------------------------------------------------------


def _have_rope(fields: Fields, num_layers: int) -> list[int]:
    """For each layer 1, or 0 if it has no rotary positions; despite the name no_rope_layers."""
    interval = fields.count("no_rope_layer_interval", default=4)
    given = fields.get("no_rope_layers")
    if given is None:
        return [int((index + 1) % interval != 0) for index in range(num_layers)]
    if (
        not isinstance(given, list)
        or len(given) != num_layers
        or not all(each in (0, 1) for each in given)
    ):
        raise fields.wrong("no_rope_layers", f"0 or 1 for each of {num_layers} layers", given)
    return given


def _smollm3_rope(fields: Fields, head: Head) -> Ropes:
    rope = RopeSettings(fields).for_all_layers(head.dim)
    have_rope = _have_rope(fields, len(head.windows))
    return Ropes(rope=rope, by_layer=tuple(rope if each else None for each in have_rope))


def _smollm3_windows(fields: Fields, num_layers: int) -> Windows:
    have_rope = _have_rope(fields, num_layers)
    return unless_off(fields, num_layers, [FULL if each else SLIDING for each in have_rope])


# ---- Mistral ------------------------------------------------------------------------------------


def _ministral3_rope(fields: Fields, head: Head) -> Ropes:
    settings = RopeSettings(fields)
    rope = settings.for_all_layers(head.dim)
    return Ropes(rope=rope, attention={"query_scaling": settings.query_scaling()})


# ---- Granite ------------------------------------------------------------------------------------


def _granite(fields: Fields) -> Design:
    """Its residual stream, x + m * f(norm(x)), is computed as x / m: RMSNorm gives the same for
    both, with its eps divided by m squared. So nothing is multiplied but the embedding."""
    residual = fields.number("residual_multiplier", 1.0)
    return replace(
        llama(fields).with_attention(scale=fields.number("attention_multiplier", 1.0)),
        norm=NormKind(eps=fields.number("rms_norm_eps", 1e-6) / residual**2),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0) / residual,
        logit_multiplier=1 / fields.number("logits_scaling", 1.0),
    )


# ---- OLMo ---------------------------------------------------------------------------------------

_OLMO = {"rms_norm_eps": 1e-5}


def _olmo2(fields: Fields) -> Design:
    return replace(
        llama(fields).with_attention(head_norms=HeadNorms.WHOLE),
        norms={"pre": False, "post": True},
        norm=NormKind(eps=0.0, is_wide=True),
    )


def _olmo3_windows(fields: Fields, num_layers: int) -> Windows:
    return by_layer_types(fields, num_layers, every(num_layers, 4))


def _olmo3_rope(fields: Fields, head: Head) -> Ropes:
    return _ropes_by_kind(fields, head, fields.number("rope_theta"))


# ---- Seed-OSS -----------------------------------------------------------------------------------


def _seed_oss(fields: Fields) -> Design:
    return llama(fields).with_attention(output_bias=fields.flag("attention_out_bias"))


# ---- EXAONE -------------------------------------------------------------------------------------


def _exaone4(fields: Fields) -> Design:
    attention = {"head_norms": HeadNorms.EACH}
    return Design(attention=attention, norms={"pre": False, "post": True})


def _exaone4_windows(fields: Fields, num_layers: int) -> Windows:
    pattern = fields.get("sliding_window_pattern")  # a number, or as many letters: "LLLG"
    if fields.get("sliding_window") is None:
        return no_window(fields, num_layers)
    is_text = isinstance(pattern, str) and pattern
    interval = len(pattern) if is_text else fields.count("sliding_window_pattern", default=4)
    return by_layer_types(fields, num_layers, every(num_layers, interval))


def _exaone4_rope(fields: Fields, head: Head) -> Ropes:
    """Where some layers have a window, only these have rotary positions."""
    rope = RopeSettings(fields).for_all_layers(head.dim)
    if not any(head.windows):
        return Ropes(rope=rope)
    return Ropes(rope=rope, by_layer=tuple(rope if each else None for each in head.windows))


# ---- Gemma --------------------------------------------------------------------------------------

_GEMMA3 = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1e6,
}


def _gemma3(fields: Fields) -> Design:
    scale = fields.number("query_pre_attn_scalar") ** -0.5
    return replace(
        llama(fields).with_attention(head_norms=HeadNorms.EACH, scale=scale),
        norms={"post": True},
        norm=_OFFSET_NORM,
        embedding_multiplier=math.sqrt(fields.count("hidden_size")),
    )


def _gemma3_windows(fields: Fields, num_layers: int) -> Windows:
    fields.get("_sliding_window_pattern")  # the same, as newer versions write it
    pattern = fields.count("sliding_window_pattern", default=6)
    return by_layer_types(fields, num_layers, every(num_layers, pattern))


def _gemma3_rope(fields: Fields, head: Head) -> Ropes:
    return _ropes_by_kind(fields, head, 10_000.0)


def _ropes_by_kind(fields: Fields, head: Head, local_theta: float) -> Ropes:
    settings = RopeSettings(fields)
    rope = settings.by_kind("full_attention", head.dim, local_theta)
    local = settings.by_kind(SLIDING, head.dim, local_theta)
    by_layer = tuple(rope if window is None else local for window in head.windows)
    return Ropes(rope=rope, by_layer=by_layer)


# ---- gpt-oss ------------------------------------------------------------------------------------

_GPT_OSS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "sliding_window": 128,
    "attention_bias": True,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss(fields: Fields) -> Design:
    has_bias = fields.flag("attention_bias")
    alpha = fields.number("swiglu_alpha", 1.702)
    experts = read_experts(
        fields,
        size=fields.count("intermediate_size", most=MAX_WIDTH),
        is_normed=True,
        has_biases=True,
        router="mlp.router",
        activation=Activation(clamp=(alpha, fields.number("swiglu_limit", 7.0))),
    )
    if experts is None:
        raise fields.wrong("num_local_experts", "a positive integer", 0)
    return Design(
        attention={"qkv_bias": has_bias, "output_bias": has_bias, "has_sinks": True},
        experts=experts,
    )


def _gpt_oss_windows(fields: Fields, num_layers: int) -> Windows:
    return by_layer_types(fields, num_layers, every(num_layers, 2))


def _gpt_oss_rope(fields: Fields, head: Head) -> Ropes:
    if fields.get("rope_parameters") is None and fields.get("rope_scaling") is None:
        fields = fields.with_defaults({"rope_scaling": _GPT_OSS_ROPE})
    return one_rope(fields, head)


# By model_type.
FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM"),
    "mistral": Family(architecture="MistralForCausalLM", windows=mistral),
    "qwen2": Family(architecture="Qwen2ForCausalLM", design=_qwen2, windows=qwen),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        design=_qwen3,
        windows=qwen,
        # Qwen3's heads are wider than hidden_size / num_heads.
        defaults={"head_dim": 128},
        without_effect=frozenset({"use_qk_norm", "qk_layernorm"}),
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        design=_qwen3_moe,
        windows=_qwen3_moe_windows,
        defaults={
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
    "qwen3_5_text": Family(
        architecture="Qwen3_5ForCausalLM",
        design=_qwen3_5,
        ropes=_qwen3_5_rope,
        windows=_every_layer,
        defaults={**_QWEN3_5, "intermediate_size": 12288},
        computes=_QWEN3_5_ROPE,
        without_effect=_QWEN3_5_UNUSED,
    ),
    "qwen3_5_moe_text": Family(
        architecture="Qwen3_5MoeForCausalLM",
        design=_qwen3_5_moe,
        ropes=_qwen3_5_rope,
        windows=_every_layer,
        defaults={
            **_QWEN3_5,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        computes=_QWEN3_5_ROPE,
        without_effect=_QWEN3_5_UNUSED,
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        design=_gpt_oss,
        ropes=_gpt_oss_rope,
        windows=_gpt_oss_windows,
        defaults=_GPT_OSS,
        # They repeat num_experts_per_tok, and the length that YaRN starts from.
        without_effect=frozenset({"experts_per_token", "initial_context_length"}),
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        design=lambda fields: Design(),
        ropes=_phi3_rope,
        windows=all_or_none,
        defaults={"rms_norm_eps": 1e-5},
        computes=frozenset({"partial_rotary_factor"}),
        has_fused_names=True,
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        ropes=_smollm3_rope,
        windows=_smollm3_windows,
        defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    ),
    "ministral3": Family(
        architecture="Ministral3ForCausalLM",
        design=lambda fields: Design(),
        ropes=_ministral3_rope,
        windows=all_or_none,
        defaults={"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        computes=frozenset({"llama_4_scaling_beta"}),
    ),
    "granite": Family(architecture="GraniteForCausalLM", design=_granite),
    "olmo2": Family(architecture="Olmo2ForCausalLM", design=_olmo2, defaults=_OLMO),
    "olmo3": Family(
        architecture="Olmo3ForCausalLM",
        design=_olmo2,
        ropes=_olmo3_rope,
        windows=_olmo3_windows,
        defaults={**_OLMO, "rope_theta": 5e5, "sliding_window": 4096},
    ),
    "seed_oss": Family(
        architecture="SeedOssForCausalLM",
        design=_seed_oss,
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    ),
    "exaone4": Family(
        architecture="Exaone4ForCausalLM",
        design=_exaone4,
        ropes=_exaone4_rope,
        windows=_exaone4_windows,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
    ),
    "gemma4_text": Family(
        architecture="Gemma4ForCausalLM",
        design=gemma4.design,
        ropes=gemma4.ropes,
        windows=gemma4.windows,
        activation="gelu_tanh",
        defaults=gemma4.DEFAULTS,
        without_effect=gemma4.WITHOUT_EFFECT,
    ),
    "gemma4_unified_text": Family(
        architecture="Gemma4UnifiedForCausalLM",
        design=gemma4.design,
        ropes=gemma4.ropes,
        windows=gemma4.windows,
        activation="gelu_tanh",
        defaults=gemma4.UNIFIED_DEFAULTS,
        without_effect=gemma4.WITHOUT_EFFECT,
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        design=_gemma3,
        ropes=_gemma3_rope,
        windows=_gemma3_windows,
        activation="gelu_tanh",
        defaults=_GEMMA3,
        exceeds_float16=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model of text and images, whose text model is served.

    texts: families that it may have under text_config, the first being the default.
    """

    architecture: str
    texts: tuple[str, ...]


# By model_type.
WRAPPERS = {
    "mistral3": Wrapper("Mistral3ForConditionalGeneration", ("mistral", "ministral3")),
    "gemma3": Wrapper("Gemma3ForConditionalGeneration", ("gemma3_text",)),
    "gemma4": Wrapper("Gemma4ForConditionalGeneration", ("gemma4_text",)),
    "gemma4_unified": Wrapper("Gemma4UnifiedForConditionalGeneration", ("gemma4_unified_text",)),
    "qwen3_5": Wrapper("Qwen3_5ForConditionalGeneration", ("qwen3_5_text",)),
    "qwen3_5_moe": Wrapper("Qwen3_5MoeForConditionalGeneration", ("qwen3_5_moe_text",)),
}


def find_family(fields: Fields) -> tuple[str, Fields]:
    """The family that config.json names, and the text model's own part of it: the whole, or its
    text_config. Raises InvalidModel."""
    architectures = fields.names("architectures") or []
    model_type = fields.text("model_type")
    family_of = {family.architecture: name for name, family in FAMILIES.items()}
    wrapper_of = {wrapper.architecture: wrapper for wrapper in WRAPPERS.values()}
    for name in architectures:
        if name in family_of:
            return family_of[name], fields
        if name in wrapper_of:
            return _wrapped(fields, wrapper_of[name])
    if not architectures and model_type in FAMILIES:
        return str(model_type), fields
    if not architectures and model_type in WRAPPERS:
        return _wrapped(fields, WRAPPERS[str(model_type)])
    raise unsupported_family(fields, architectures, model_type, [*family_of, *wrapper_of])


def _wrapped(fields: Fields, wrapper: Wrapper) -> tuple[str, Fields]:
    text = Fields(f"{fields.path}: text_config", fields.mapping("text_config"))
    family = text.text("model_type") or wrapper.texts[0]
    if family not in wrapper.texts:
        raise InvalidModel(
            f"{fields.path} names the architecture {wrapper.architecture} with the text model "
            f"{shown(family)}, which is not supported; supported are {', '.join(wrapper.texts)}",
            brief=f"{wrapper.architecture} with {family!s:.40} is not supported",
        )
    return family, text
