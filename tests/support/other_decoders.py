"""Small random models of decoders that have no row of their own, which transformers computes."""

from typing import Any

import torch
import transformers

from tests.support.tiny_models import MAX_LEN

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GLM_MOE = {
    **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
}
_MLA = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "num_key_value_heads": 4},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12},
}
_WINDOWS = {
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_GPT2 = {"n_positions": MAX_LEN, "n_embd": 64, "n_layer": 3, "n_head": 4}
# model_type -> (published as, the class, settings that differ from those above)
OTHER_DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt_oss": (
        "gpt-oss-20b, -120b, dequantized",
        "GptOss",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
            **_WINDOWS,
        },
    ),
    "gemma2": (
        "Gemma 2",
        "Gemma2",
        {
            **{"head_dim": 24, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 2.0},
            **{"final_logit_softcapping": 3.0, **_WINDOWS},
        },
    ),
    "deepseek_v3": ("DeepSeek V3, R1, in bfloat16", "DeepseekV3", {**_GLM_MOE, **_MLA}),
    "minimax_m2": (
        "MiniMax-M2",
        "MiniMaxM2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 24},
    ),
    "gemma": ("Gemma", "Gemma", {"head_dim": 24}),
    "glm": ("GLM-4 9B (0414 and earlier)", "Glm", {"head_dim": 16}),
    "glm4": ("GLM-4 32B, Z1", "Glm4", {"head_dim": 16}),
    "cohere": ("Command R", "Cohere", {}),
    "cohere2": ("Command R7B, Command A", "Cohere2", {**_WINDOWS, "head_dim": 16}),
    "starcoder2": ("StarCoder2", "Starcoder2", {"sliding_window": 9}),
    "phi": ("Phi-1, Phi-2", "Phi", {}),
    "phimoe": ("Phi-3.5-MoE", "Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral": ("Mixtral", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("OLMoE", "Olmoe", _MOE),
    "olmo": ("OLMo", "Olmo", {}),
    "granitemoe": (
        "Granite 3 MoE",
        "GraniteMoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "ernie4_5": ("ERNIE 4.5, dense", "Ernie4_5", {"head_dim": 16}),
    "nemotron": ("Nemotron 3, Minitron", "Nemotron", {}),
    "helium": ("Helium", "Helium", {"head_dim": 16}),
    "gpt_neox": ("Pythia, GPT-NeoX", "GPTNeoX", {}),
    "gpt_bigcode": ("StarCoder", "GPTBigCode", _GPT2),
    "gpt2": ("GPT-2", "GPT2", _GPT2),
    "stablelm": ("StableLM 2", "StableLm", {"use_qkv_bias": True, "qk_layernorm": True}),
    "opt": ("OPT", "OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
}
# model_type -> (the class, settings, what a pass through it shows)
REFUSED_CLASSES: dict[str, tuple[str, dict[str, Any], str]] = {
    "minimax": (
        "MiniMax",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "block_size": 8},
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
        "it keeps more of earlier tokens than the keys and values",
    ),
    "llama4_text": (
        "Llama4",
        {
            **{"num_local_experts": 4, "attention_chunk_size": 16, "head_dim": 16},
            **{"intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 0]},
        },
        "attend to other positions than all before a token",
    ),
    "diffllama": ("DiffLlama", {}, "one of its layers attends twice"),
    "doge": ("Doge", {}, "do not say by a mask which positions"),
    "mpt": ("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}, "it computes attention itself"),
}
# Classes without the settings' usual names.
_HEADS = {"gpt2": "GPT2LMHeadModel"}
_OWN_SIZES = ("gpt2", "gpt_bigcode")


def make_other(model_type: str, seed: int = 0, **options: Any) -> Any:
    """transformers' model, in evaluation mode, with random weights, norms and biases included."""
    _, prefix, extra = OTHER_DECODERS[model_type]
    sizes = (
        _SIZES
        if model_type not in _OWN_SIZES
        else {name: _SIZES[name] for name in _SIZES if name.endswith(("_id", "vocab_size"))}
    )
    config = getattr(transformers, f"{prefix}Config")(
        **{**sizes, **extra, **options}, attn_implementation="eager"
    )
    model = getattr(transformers, architecture_of(model_type))(config).eval()
    randomize(model, seed)
    return model


def make_refused(model_type: str) -> tuple[Any, str]:
    """transformers' model, and why it is refused."""
    prefix, extra, why = REFUSED_CLASSES[model_type]
    config_class: Any = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    config = config_class(**{**_SIZES, **extra}, attn_implementation="eager")
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    randomize(model)
    return model, why


def architecture_of(model_type: str) -> str:
    return _HEADS.get(model_type) or f"{OTHER_DECODERS[model_type][1]}ForCausalLM"


def randomize(model: Any, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + noise / 4 if "norm" in name else noise / 8
