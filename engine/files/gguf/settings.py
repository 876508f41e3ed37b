"""A GGUF file's metadata as the JSON files of a Hugging Face directory, so that whatever reads and
checks those reads and checks it too."""

import struct
from pathlib import Path
from typing import Any

from penstock.engine.errors import InvalidModel
from penstock.engine.files.gguf.file import GgufFile, open_gguf
from penstock.engine.files.gguf.tokens import Tokens

# By general.architecture: the name in transformers.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Fields of generation_config.json, by what the metadata calls them.
_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
# Fields of config.json, by what the metadata calls them, after the architecture.
_FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "is_causal": "attention.causal",
    # Other architectures have these: refused unless they change nothing.
    "num_experts": "expert_count",
    "clip_qkv": "attention.clamp_kqv",
    "attention_multiplier": "attention.scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
}
_ROPE_FACTORS = "rope_freqs.weight"


def read_settings(path: Path, name: str) -> dict[str, Any] | None:
    """Says what a directory's file of this name would hold; None where there is no such thing.

    Raises InvalidModel.
    """
    make = _FILES.get(name)
    return make(open_gguf(path)) if make else None


def _config(gguf: GgufFile) -> dict[str, Any]:
    metadata, tensors = gguf.metadata, gguf.tensors
    name = _architecture(gguf)
    config: dict[str, Any] = {"architectures": [_ARCHITECTURES[name]], "model_type": name}
    for field, key in _FIELDS.items():
        value = metadata.get(f"{name}.{key}")
        # Where they may differ, there is one of each layer.
        config[field] = value[0] if isinstance(value, list) and len(set(value)) == 1 else value
    head_dim = metadata.get(f"{name}.attention.key_length")
    if head_dim is None:
        head_dim = _quotient(config["hidden_size"], config["num_attention_heads"])
    value_dim = metadata.get(f"{name}.attention.value_length", head_dim)
    if value_dim != head_dim:
        raise InvalidModel(
            f"{gguf.path} has keys of {head_dim!r:.20} and values of {value_dim!r:.20} dimensions; "
            "only models that have as many of both are supported"
        )
    rotated = metadata.get(f"{name}.rope.dimension_count", head_dim)
    if head_dim and rotated != head_dim:
        # The rows of Llama's heads are permuted for pairs of neighbours, of all dimensions or some.
        raise InvalidModel(
            f"{gguf.path} rotates {rotated!r:.20} of a head's {head_dim!r:.20} dimensions; in GGUF "
            "only models that rotate all of them are supported"
        )
    window = metadata.get(f"{name}.attention.sliding_window") if name == "llama" else None
    if window:
        config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    embedding = tensors.get("token_embd.weight")
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    return config | {
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0] if embedding else len(tokens),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": name != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "rope_parameters": _rope(gguf, name),
    }


def _architecture(gguf: GgufFile) -> str:
    kind = gguf.metadata.get("general.type", "model")
    name = gguf.metadata.get("general.architecture")
    if kind != "model":
        raise InvalidModel(
            f"{gguf.path} is a GGUF file of the type {kind!r:.40}, and not a model",
            brief=f"of the type {kind!r:.40}, not a model",
        )
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise InvalidModel(
            f"{gguf.path} has the architecture {name!r:.80}, which is not supported; supported in "
            f"GGUF are {', '.join(_ARCHITECTURES)}, of which llama is Mistral's too",
            brief=f"{name!s:.40} is not supported",
        )
    return name


def _rope(gguf: GgufFile, name: str) -> dict[str, Any]:
    def given(key: str) -> Any:
        return gguf.metadata.get(f"{name}.rope.{key}")

    kind = given("scaling.type")
    factor = given("scaling.factor")
    if kind is None and given("scale_linear") not in (None, 1.0):  # of older files
        kind, factor = "linear", given("scale_linear")
    trained = given("scaling.original_context_length")
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": given("freq_base")}
    if kind in (None, "none"):
        rope["rope_type"] = "default"
    elif kind == "yarn":
        rope |= {
            "factor": factor,
            "original_max_position_embeddings": trained,
            "beta_fast": given("scaling.yarn_beta_fast"),
            "beta_slow": given("scaling.yarn_beta_slow"),
            "attention_factor": given("scaling.yarn_attn_factor"),
        }
        if given("scaling.attn_factor") not in (None, 1.0):
            raise InvalidModel(
                f"{gguf.path} has {name}.rope.scaling.attn_factor, which is not supported"
            )
    else:
        rope["factor"] = factor
    return rope | _rope_factors(gguf, rope["rope_type"])


def _rope_factors(gguf: GgufFile, kind: str) -> dict[str, Any]:
    """Llama 3's scaling, as what each frequency is divided by; empty for a file without it."""
    if _ROPE_FACTORS not in gguf.tensors:
        return {}
    if kind != "default":
        raise InvalidModel(
            f"{gguf.path} has both {_ROPE_FACTORS} and {kind!r:.40} rope scaling, which is not "
            "supported together"
        )
    # In transformers' words, LongRoPE with the same factors for all lengths.
    factors = _numbers(gguf, _ROPE_FACTORS)
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
    }


def _numbers(gguf: GgufFile, name: str) -> list[float]:
    """A small tensor of float32."""
    info = gguf.tensors[name]
    if info.type.name != "F32" or info.num_elements > 2**16:
        raise InvalidModel(f"{gguf.path} has the tensor {name!r} in a type other than F32")
    with gguf.part_of[name].open("rb") as file:
        file.seek(info.offset)
        return list(struct.unpack(f"<{info.num_elements}f", file.read(info.num_bytes)))


def _quotient(number: Any, divisor: Any) -> Any:
    """None where the metadata has no such numbers, which the check of config.json says better."""
    if not all(isinstance(each, int) and each > 0 for each in (number, divisor)):
        return None
    return number // divisor


def _generation_config(gguf: GgufFile) -> dict[str, Any]:
    given = {field: gguf.metadata.get(key) for field, key in _SAMPLING.items()}
    known = {field: value for field, value in given.items() if value is not None}
    return {"eos_token_id": Tokens(gguf.path, gguf.metadata).end_ids(), **known}


def _tokenizer_config(gguf: GgufFile) -> dict[str, Any]:
    template = gguf.metadata.get("tokenizer.chat_template")
    return {**Tokens(gguf.path, gguf.metadata).special(), "chat_template": template}


_FILES = {
    "config.json": _config,
    "generation_config.json": _generation_config,
    "tokenizer_config.json": _tokenizer_config,
}
