"""A GGUF file's metadata as the JSON files of a Hugging Face directory, so that whatever reads and
checks those reads and checks it too."""

from pathlib import Path
from typing import Any

from penstock.engine.errors import InvalidModel
from penstock.engine.files.gguf.architectures import ARCHITECTURES, Architecture
from penstock.engine.files.gguf.file import GgufFile, open_gguf
from penstock.engine.files.gguf.keys import Keys, quotient
from penstock.engine.files.gguf.rope import rope, share_of
from penstock.engine.files.gguf.tokens import Tokens

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
    # Some architectures have these: refused by others unless they change nothing.
    "num_experts": "expert_count",
    "clip_qkv": "attention.clamp_kqv",
    "attention_multiplier": "attention.scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logits_scaling": "logit_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
}


def read_settings(path: Path, name: str) -> dict[str, Any] | None:
    """Says what a directory's file of this name would hold; None where there is no such thing.
    Raises InvalidModel."""
    make = _FILES.get(name)
    return make(open_gguf(path)) if make else None


def _config(gguf: GgufFile) -> dict[str, Any]:
    keys = Keys(gguf, architecture_name(gguf))
    architecture = ARCHITECTURES[keys.architecture]
    config: dict[str, Any] = {"model_type": architecture.family}
    for field, key in _FIELDS.items():
        value = keys.get(key)
        # Where they may differ, there is one of each layer.
        config[field] = value[0] if isinstance(value, list) and len(set(value)) == 1 else value
    head_dim = keys.get("attention.key_length")
    if head_dim is None:
        head_dim = quotient(config["hidden_size"], config["num_attention_heads"])
    value_dim = keys.get("attention.value_length", head_dim)
    if value_dim != head_dim and not architecture.has_latents:
        raise InvalidModel(
            f"{gguf.path} has keys of {head_dim!r:.20} and values of {value_dim!r:.20} dimensions; "
            "only models that have as many of both are supported"
        )
    embedding = gguf.tensors.get("token_embd.weight")
    tokens = gguf.metadata.get("tokenizer.ggml.tokens", ())
    config |= {
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0] if embedding else len(tokens),
        "tie_word_embeddings": not keys.has("output.weight"),
        "attention_bias": any(keys.has(f"blk.0.attn_{kind}.bias") for kind in ("q", "qkv")),
        "mlp_bias": keys.has("blk.0.ffn_up.bias"),
        "rope_parameters": {**_rotated_share(keys, architecture, head_dim), **rope(keys)},
    }
    return config | architecture.read(keys, config)


def architecture_name(gguf: GgufFile) -> str:
    """One of ARCHITECTURES. Raises InvalidModel."""
    kind = gguf.metadata.get("general.type", "model")
    name = gguf.metadata.get("general.architecture")
    if kind != "model":
        raise InvalidModel(
            f"{gguf.path} is a GGUF file of the type {kind!r:.40}, and not a model",
            brief=f"of the type {kind!r:.40}, not a model",
        )
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise InvalidModel(
            f"{gguf.path} has the architecture {name!r:.80}, which is not supported; supported in "
            f"GGUF are {', '.join(ARCHITECTURES)}, of which llama is Mistral's too",
            brief=f"{name!s:.40} is not supported",
        )
    return name


def _rotated_share(keys: Keys, architecture: Architecture, head_dim: Any) -> dict[str, Any]:
    """Says which share of a head is rotated; empty where it can only be the whole. Raises
    InvalidModel."""
    rotated = keys.get("rope.dimension_count", head_dim)
    is_whole = rotated == head_dim and not architecture.rotates_parts
    if not head_dim or is_whole or architecture.has_latents:
        return {}
    if not architecture.rotates_parts or quotient(rotated, head_dim) is None:
        raise InvalidModel(
            f"{keys.gguf.path} rotates {rotated!r:.20} of a head's {head_dim!r:.20} dimensions; in "
            f"GGUF only models of {keys.architecture} that rotate all of them are supported"
        )
    return {"partial_rotary_factor": share_of(rotated, head_dim)}


def _generation_config(gguf: GgufFile) -> dict[str, Any]:
    given = {field: gguf.metadata.get(key) for field, key in _SAMPLING.items()}
    known = {field: value for field, value in given.items() if value is not None}
    return {"eos_token_id": Tokens(gguf.path, gguf.metadata).end_ids(), **known}


def _tokenizer_config(gguf: GgufFile) -> dict[str, Any]:
    key = "tokenizer.chat_template"
    template = gguf.metadata.get(key)
    names = gguf.metadata.get(f"{key}s")
    if isinstance(names, list):  # several, of which that is the default
        given = {name: gguf.metadata.get(f"{key}.{name}") for name in names}
        templates = {"default": template, **given}.items()
        template = [{"name": name, "template": text} for name, text in templates if text]
    return {**Tokens(gguf.path, gguf.metadata).special(), "chat_template": template}


_FILES = {
    "config.json": _config,
    "generation_config.json": _generation_config,
    "tokenizer_config.json": _tokenizer_config,
}
