"""The families of models that are served: a row each, with the design of its layers.

One more family is one more row here, if its layers are made of parts that there are. Source of all
facts: the classes of transformers with these names, which the tests compare with.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from penstock.engine.files.json_file import Fields, shown
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.families import deepseek, gemma4
from penstock.engine.models.families.encoders import ENCODERS
from penstock.engine.models.families.outline import (
    ATTENTION_BIASES,
    Design,
    Family,
    Ropes,
    one_rope,
    read_softcap,
    ropes_by_kind,
)
from penstock.engine.models.families.pooled_heads import CLASSIFIER
from penstock.engine.models.families.unsupported import unsupported_family
from penstock.engine.models.parts.attention.config import HeadNorms
from penstock.engine.models.parts.attention.rope import RopeSettings
from penstock.engine.models.parts.attention.windows import (
    FULL,
    SLIDING,
    Windows,
    all_or_none,
    by_layer_types,
    full_every,
    no_window,
    qwen,
    unless_off,
)
from penstock.engine.models.parts.delta_net.config import read_delta_nets
from penstock.engine.models.parts.experts.config import (
    MAX_WIDTH,
    qwen_layers,
    read_experts,
)
from penstock.engine.models.parts.mlp.config import Activation
from penstock.engine.models.parts.tensors import NormKind

# Weights of norms are stored less 1, and multiplied in float32.
_OFFSET_NORM = NormKind(eps=0.0, is_wide=True, offset=1.0)
_WIDE_NORM = NormKind(eps=0.0, is_wide=True)

# ---- Qwen ---------------------------------------------------------------------------------------


def _qwen3_moe(fields: Fields, design: Design, *, shared_size: int = 0) -> Design:
    is_normed = fields.flag("norm_topk_prob")
    experts = read_experts(fields, is_normed=is_normed, shared_size=shared_size)
    return replace(design, experts=experts, have_experts=qwen_layers(fields))


def _qwen2_moe(fields: Fields, design: Design) -> Design:
    size = fields.count("shared_expert_intermediate_size", most=MAX_WIDTH)
    return _qwen3_moe(fields, design, shared_size=size)


def _qwen2_moe_windows(fields: Fields, num_layers: int) -> Windows:
    """Without layer_types, every second layer has the window. transformers writes 0 for none."""
    if fields.get("sliding_window") == 0:
        return no_window(fields, num_layers)
    first = fields.count("max_window_layers", default=28, least=0)
    have = (index % 2 == 0 and index < first for index in range(num_layers))
    return unless_off(fields, num_layers, [SLIDING if each else FULL for each in have])


def _qwen3_vl_moe(fields: Fields, design: Design) -> Design:
    """Weights of experts are normed, whatever norm_topk_prob says."""
    experts = read_experts(fields, is_normed=True)
    return replace(design, experts=experts, have_experts=qwen_layers(fields))


def _qwen3_5(fields: Fields, design: Design) -> Design:
    if not fields.flag("attn_output_gate", default=True):
        raise fields.wrong("attn_output_gate", "true", False)
    return replace(design, mixers=read_delta_nets(fields))


def _qwen3_5_moe(fields: Fields, design: Design) -> Design:
    shared_size = fields.count("shared_expert_intermediate_size", least=0, most=MAX_WIDTH)
    experts = read_experts(fields, least=1, is_normed=True, shared_size=shared_size)
    return replace(_qwen3_5(fields, design), experts=experts)


_QWEN3_5_DEFAULTS = {
    "vocab_size": 248_320,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def _rope_of_images(
    fields: Fields,
    head_dim: int,
    windows: Windows,
    *,
    sections: tuple[int, int, int],
    ropes: Callable[[Fields, int, Windows], Ropes] = one_rope,
) -> Ropes:
    """sections: where config.json has none. ropes: reads the rest."""
    read = ropes(fields, head_dim, windows)
    sections = RopeSettings(fields).sections(sections)
    return replace(read, rope=replace(read.rope, sections=sections))


# ---- Phi ----------------------------------------------------------------------------------------


def _partial_rope(
    fields: Fields,
    head_dim: int,
    windows: Windows,
    *,
    default: float = 1.0,
    kinds: Mapping[str, str] | None = None,
) -> Ropes:
    """default: of the share of a head that is rotated. kinds: see `RopeSettings`."""
    settings = RopeSettings(fields, kinds)
    rotary_dim = int(head_dim * settings.share_of_head(default))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise InvalidModel(
            f"{fields.path}: partial_rotary_factor rotates {rotary_dim} of a head's {head_dim} "
            "dimensions; it must be an even number of them"
        )
    rope = settings.for_all_layers(rotary_dim)
    attention = {} if rotary_dim == head_dim else {"rotary_dim": rotary_dim}
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


def _smollm3_rope(fields: Fields, head_dim: int, windows: Windows) -> Ropes:
    rope = RopeSettings(fields).for_all_layers(head_dim)
    have_rope = _have_rope(fields, len(windows))
    return Ropes(rope=rope, by_layer=tuple(rope if each else None for each in have_rope))


def _smollm3_windows(fields: Fields, num_layers: int) -> Windows:
    """Of layers that layer_types says have one, whether windows are used or not."""
    is_used = fields.flag("use_sliding_window")
    have_rope = _have_rope(fields, num_layers)
    default = [SLIDING if is_used and not each else FULL for each in have_rope]
    return by_layer_types(fields, num_layers, default)


# ---- Mistral ------------------------------------------------------------------------------------


_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _ministral3_rope(fields: Fields, head_dim: int, windows: Windows) -> Ropes:
    settings = RopeSettings(fields)
    rope = settings.for_all_layers(head_dim)
    return Ropes(rope=rope, attention={"query_scaling": settings.query_scaling()})


# ---- Granite ------------------------------------------------------------------------------------


def _granite(fields: Fields, design: Design) -> Design:
    """Its residual stream, x + m * f(norm(x)), is computed as x / m: RMSNorm gives the same for
    both, with its eps divided by m squared. So nothing is multiplied but the embedding."""
    residual = fields.number("residual_multiplier", 1.0)
    return replace(
        design.with_attention(scale=fields.number("attention_multiplier", 1.0)),
        norm=NormKind(eps=fields.number("rms_norm_eps", 1e-6) / residual**2),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0) / residual,
        logit_multiplier=1 / fields.number("logits_scaling", 1.0),
    )


# ---- EXAONE -------------------------------------------------------------------------------------


def _exaone4_windows(fields: Fields, num_layers: int) -> Windows:
    pattern = fields.get("sliding_window_pattern")  # a number, or as many letters: "LLLG"
    if fields.get("sliding_window") is None:
        return no_window(fields, num_layers)
    is_text = isinstance(pattern, str) and pattern
    interval = len(pattern) if is_text else fields.count("sliding_window_pattern", default=4)
    return full_every(interval, fields, num_layers)


def _exaone4_rope(fields: Fields, head_dim: int, windows: Windows) -> Ropes:
    """Where there is a window, only layers that have it have rotary positions, be they none."""
    rope = RopeSettings(fields).for_all_layers(head_dim)
    if fields.get("sliding_window") is None:
        return Ropes(rope=rope)
    return Ropes(rope=rope, by_layer=tuple(rope if each else None for each in windows))


# ---- Gemma --------------------------------------------------------------------------------------

_GEMMA3_DEFAULTS = {
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


def _gemma3(fields: Fields, design: Design) -> Design:
    scale = fields.number("query_pre_attn_scalar") ** -0.5
    is_two_sided = fields.flag("use_bidirectional_attention")
    return replace(
        design.with_attention(scale=scale, is_two_sided=is_two_sided),
        embedding_multiplier=math.sqrt(fields.count("hidden_size")),
        logit_softcap=read_softcap(fields),
    )


def _gemma3_windows(fields: Fields, num_layers: int) -> Windows:
    """A window to both sides is divided among them, and counts a token's own position twice."""
    interval = fields.count("sliding_window_pattern", default=6)
    windows = full_every(interval, fields, num_layers)
    if not fields.flag("use_bidirectional_attention"):
        return windows
    return tuple(window and window // 2 + 1 for window in windows)


# ---- gpt-oss ------------------------------------------------------------------------------------

_GPT_OSS_DEFAULTS = {
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


def _gpt_oss(fields: Fields, design: Design) -> Design:
    alpha = fields.number("swiglu_alpha", 1.702)
    experts = read_experts(
        fields,
        size="intermediate_size",
        least=1,
        is_normed=True,
        has_biases=True,
        router="mlp.router",
        activation=Activation(clamp=(alpha, fields.number("swiglu_limit", 7.0))),
    )
    return replace(design, experts=experts)


def _scaled_rope(
    fields: Fields,
    head_dim: int,
    windows: Windows,
    *,
    default: dict[str, Any],
    ropes: Callable[[Fields, int, Windows], Ropes] = one_rope,
) -> Ropes:
    """default: the scaling where config.json says nothing of it. ropes: reads it."""
    if fields.get("rope_parameters") is None and not fields.mapping("rope_scaling"):
        fields = fields.with_defaults({"rope_scaling": default})
    return ropes(fields, head_dim, windows)


# ---- GLM ----------------------------------------------------------------------------------------


def _glm4_moe(fields: Fields, design: Design) -> Design:
    if fields.flag("use_qk_norm"):
        design = design.with_attention(head_norms=HeadNorms.EACH)
    return deepseek.with_experts(fields, design)


# ---- Code World Model ---------------------------------------------------------------------------

_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


# ---- The table ----------------------------------------------------------------------------------

_QWEN3_5 = Family(
    architecture="Qwen3_5ForCausalLM",
    design=Design(
        attention={"head_norms": HeadNorms.EACH, "has_gates": True},
        mlp_flags={},
        norm=_OFFSET_NORM,
    ),
    read=_qwen3_5,
    ropes=partial(
        _rope_of_images, sections=(11, 11, 10), ropes=partial(_partial_rope, default=0.25)
    ),
    windows=lambda fields, num_layers: (None,) * num_layers,
    defaults={**_QWEN3_5_DEFAULTS, "intermediate_size": 12288},
    computes=frozenset({"partial_rotary_factor"}),
    without_effect=frozenset(
        {
            # The first two belong to the layer that drafts the token after the next.
            *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
            # The type in which other programs keep the states; here it is float32.
            "mamba_ssm_dtype",
        }
    ),
)
_QWEN3_VL = Family(
    architecture="Qwen3VLTextModel",
    design=Design(attention={"head_norms": HeadNorms.EACH}, mlp_flags={}),
    ropes=partial(_rope_of_images, sections=(24, 20, 20)),
    defaults={"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 5e5},
)
_OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    design=Design(
        attention={"head_norms": HeadNorms.WHOLE},
        norms={"pre": False, "post": True},
        norm=_WIDE_NORM,
    ),
    defaults={"rms_norm_eps": 1e-5},
)
_GEMMA4 = Family(
    architecture="Gemma4ForCausalLM",
    design=Design(
        attention={"head_norms": HeadNorms.EACH, "scale": 1.0, "norms_values": True},
        mlp_flags={},
        norms={"post": True, "has_scalar": True},
        norm=_WIDE_NORM,
    ),
    read=gemma4.read,
    ropes=gemma4.ropes,
    windows=gemma4.windows,
    activation="gelu_tanh",
    defaults=gemma4.DEFAULTS,
    without_effect=gemma4.WITHOUT_EFFECT,
)
# By model_type.
FAMILIES = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        ropes=_partial_rope,
        computes=frozenset({"partial_rotary_factor"}),
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        windows=all_or_none,
        defaults={"sliding_window": 4096},
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        design=Design(attention={"qkv_bias": True}, attention_flags={}),
        windows=qwen,
        without_effect=frozenset({"attention_bias"}),  # its layers have these biases in any case
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        design=Design(attention_flags={"qkv_bias": "qkv_bias"}, mlp_flags={}),
        read=_qwen2_moe,
        windows=_qwen2_moe_windows,
        defaults={
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        design=Design(attention={"head_norms": HeadNorms.EACH}),
        windows=qwen,
        # Qwen3's heads are wider than hidden_size / num_heads.
        defaults={"head_dim": 128},
        without_effect=frozenset({"use_qk_norm", "qk_layernorm"}),
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        design=Design(attention={"head_norms": HeadNorms.EACH}, mlp_flags={}),
        read=_qwen3_moe,
        windows=lambda fields, num_layers: unless_off(fields, num_layers, [SLIDING] * num_layers),
        defaults={
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
        },
        without_effect=frozenset({"max_window_layers"}),  # all layers have the window
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": replace(
        _QWEN3_5,
        architecture="Qwen3_5MoeForCausalLM",
        read=_qwen3_5_moe,
        defaults={
            **_QWEN3_5_DEFAULTS,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
    ),
    "qwen3_vl_text": _QWEN3_VL,
    "qwen3_vl_moe_text": replace(
        _QWEN3_VL,
        architecture="Qwen3VLMoeTextModel",
        read=_qwen3_vl_moe,
        defaults={
            "num_key_value_heads": 16,
            "rope_theta": 5e5,
            "moe_intermediate_size": 1408,
            "num_local_experts": 60,
            "num_experts_per_tok": 4,
            "tie_word_embeddings": True,
        },
        without_effect=frozenset({"norm_topk_prob"}),
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        design=Design(attention={"has_sinks": True}, mlp_flags={}),
        read=_gpt_oss,
        ropes=partial(_scaled_rope, default=_GPT_OSS_ROPE),
        windows=partial(full_every, 2),
        defaults=_GPT_OSS_DEFAULTS,
        # They repeat num_experts_per_tok, and the length that YaRN starts from.
        without_effect=frozenset({"experts_per_token", "initial_context_length"}),
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        design=Design(attention_flags={}, mlp_flags={}),
        # "su" and "yarn" are what the first Phi-3 called LongRoPE.
        ropes=partial(_partial_rope, kinds={"su": "longrope", "yarn": "longrope"}),
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
        design=Design(attention_flags={}, mlp_flags={}),
        ropes=partial(_scaled_rope, default=_MINISTRAL3_ROPE, ropes=_ministral3_rope),
        windows=all_or_none,
        defaults={"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        computes=frozenset({"llama_4_scaling_beta"}),
    ),
    "granite": Family(architecture="GraniteForCausalLM", read=_granite),
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        architecture="Olmo3ForCausalLM",
        ropes=ropes_by_kind,
        windows=partial(full_every, 4),
        defaults={**_OLMO2.defaults, "rope_theta": 5e5, "sliding_window": 4096},
    ),
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM",
        design=Design(attention_flags={"qkv_bias": "attention_bias"}, mlp_flags={}),
        read=_glm4_moe,
        ropes=partial(_partial_rope, default=0.5),
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        computes=frozenset({"partial_rotary_factor"}),
    ),
    "seed_oss": Family(
        architecture="SeedOssForCausalLM",
        design=Design(attention_flags={**ATTENTION_BIASES, "output_bias": "attention_out_bias"}),
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    ),
    "cwm": Family(
        architecture="CwmForCausalLM",
        design=Design(attention_flags={}),
        ropes=partial(_scaled_rope, default=_CWM_ROPE),
        windows=partial(full_every, 4, first=0),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": 8192,
        },
    ),
    "exaone4": Family(
        architecture="Exaone4ForCausalLM",
        design=Design(
            attention={"head_norms": HeadNorms.EACH},
            attention_flags={},
            mlp_flags={},
            norms={"pre": False, "post": True},
        ),
        ropes=_exaone4_rope,
        windows=_exaone4_windows,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
    ),
    **deepseek.FAMILIES,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": replace(
        _GEMMA4,
        architecture="Gemma4UnifiedForCausalLM",
        defaults=gemma4.UNIFIED_DEFAULTS,
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        design=Design(
            attention={"head_norms": HeadNorms.EACH, "has_spans": True},
            norms={"post": True},
            norm=_OFFSET_NORM,
        ),
        read=_gemma3,
        ropes=partial(ropes_by_kind, local_theta=10_000.0),
        windows=_gemma3_windows,
        activation="gelu_tanh",
        defaults=_GEMMA3_DEFAULTS,
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
    "mistral3": Wrapper("Mistral3ForConditionalGeneration", ("mistral", "ministral3", "mistral4")),
    "gemma3": Wrapper("Gemma3ForConditionalGeneration", ("gemma3_text",)),
    "gemma4": Wrapper("Gemma4ForConditionalGeneration", ("gemma4_text",)),
    "gemma4_unified": Wrapper("Gemma4UnifiedForConditionalGeneration", ("gemma4_unified_text",)),
    "qwen3_vl": Wrapper("Qwen3VLForConditionalGeneration", ("qwen3_vl_text",)),
    "qwen3_vl_moe": Wrapper("Qwen3VLMoeForConditionalGeneration", ("qwen3_vl_moe_text",)),
    "qwen3_5": Wrapper("Qwen3_5ForConditionalGeneration", ("qwen3_5_text",)),
    "qwen3_5_moe": Wrapper("Qwen3_5MoeForConditionalGeneration", ("qwen3_5_moe_text",)),
}


# Decoders, and encoders of text.
SERVED = {**FAMILIES, **ENCODERS}


_FAMILY_OF = {family.architecture: name for name, family in SERVED.items()}
# What a class computes of states, or that it computes no more than states.
_HEAD = re.compile(r"(Model|ForMaskedLM|ForPreTraining|ForSequenceClassification)$")
# What the code that models came with before transformers had it calls a class.
_OLDER = {"New": "Gte"}


def _family(architecture: str, fields: Fields) -> str | None:
    """The family of which this is a class, with any head that is served."""
    if architecture in _FAMILY_OF or fields.get("text_config") is not None:
        return _FAMILY_OF.get(architecture)
    base, num_heads = _HEAD.subn("", architecture)
    base = _OLDER.get(base, base)
    classes = [f"{base}Model"] if num_heads else []
    if architecture.endswith(("Model", CLASSIFIER)):
        classes.append(f"{base.removesuffix('Text')}ForCausalLM")
    return next((_FAMILY_OF[each] for each in classes if each in _FAMILY_OF), None)


def find_family(fields: Fields) -> tuple[str, Fields]:
    """The family that config.json names, and the text model's own part of it: the whole, or its
    text_config. Raises InvalidModel."""
    architectures = fields.names("architectures") or []
    model_type = fields.text("model_type")
    wrapper_of = {wrapper.architecture: name for name, wrapper in WRAPPERS.items()}
    named = [wrapper_of.get(name) or _family(name, fields) for name in architectures]
    named = named or [model_type]
    for name in named:
        if name in SERVED:
            return name, fields
        if name in WRAPPERS:
            return _wrapped(fields, WRAPPERS[name])
    encoders = [family.architecture for family in ENCODERS.values()]
    decoders = [name for name in (*_FAMILY_OF, *wrapper_of) if name not in encoders]
    raise unsupported_family(fields, architectures, model_type, decoders, encoders)


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
