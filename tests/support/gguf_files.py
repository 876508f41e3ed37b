"""GGUF files, written by llama.cpp's own package: names, metadata, quantization and the permutation
of Llama's heads come from there, or are as in its converter."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from numpy.typing import NDArray

from tests.support.gguf_blocks import quantized_blocks
from tests.support.gguf_mixtures import LATENTS, WITH_PARTS, add_settings, converted
from tests.support.tiny_models import FAMILIES, HYBRID_FAMILIES, LATENT_FAMILIES

# By the family of the model.
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "gemma4_unified_text": gguf.MODEL_ARCH.GEMMA4,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    **dict.fromkeys(LATENTS, gguf.MODEL_ARCH.DEEPSEEK2),
}
_PERMUTED = (
    gguf.MODEL_ARCH.LLAMA,
    gguf.MODEL_ARCH.MISTRAL3,
    gguf.MODEL_ARCH.SMOLLM3,
    gguf.MODEL_ARCH.GRANITE,
)
_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA3: dict[str, Any] = {
    # As every Gemma 3 but the 27B, and the layers that llama.cpp takes it to have.
    "query_pre_attn_scalar": 24,
    "num_hidden_layers": 6,
    "layer_types": [*[_SLIDING] * 5, _FULL],
}
# llama.cpp has one factor for angles and scores.
_ROPE = LATENT_FAMILIES["youtu"][1]["rope_parameters"]
_ONE_MSCALE = {"rope_parameters": {**_ROPE, "mscale": _ROPE["mscale_all_dim"]}}
# What the names of a text model's tensors begin with.
_TEXT = ("model.layers.", "model.embed_tokens", "model.norm.", "model.per_layer_", "lm_head.")
# The tiny models that are written, with what the metadata has no place for as llama.cpp takes it to
# be: of `tests.support.tiny_models`, without some settings of YaRN and of windows.
WRITTEN: dict[str, dict[str, Any]] = {
    **{name: {} for name in FAMILIES if name not in ("llama_yarn", "qwen2_window")},
    **{name: {} for name in ("ministral3", "ministral3_wrapped", "mistral_small_wrapped")},
    **{name: {} for name in ("phi4", "phi4_mini", "granite", "olmo2", "olmo3", "seed_oss")},
    "smollm3": {"no_rope_layers": None, "num_hidden_layers": 4},
    **{name: {} for name in ("exaone4", "exaone4_no_window")},
    **dict.fromkeys(("gemma3", "gemma3_wrapped"), _GEMMA3),
    **{name: {} for name in ("gemma4", "gemma4_moe", "gemma4_small_wrapped")},
    "gemma4_unified_wrapped": {},
    **{name: {} for name in ("qwen2_moe", "qwen3_moe", *HYBRID_FAMILIES)},
    "gpt_oss": {"swiglu_limit": 7.0},
    **{name: {} for name in ("glm4_moe", "glm4_moe_groups", "glm4_moe_lite")},
    **dict.fromkeys(("youtu", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3"), _ONE_MSCALE),
    "youtu_direct": {"rope_interleave": True},
}
# Of a tensor, by its name in the file.
TypeOf = Callable[[str], Type]
# All tensors by these names, as others that the converter may write in place of some.
Arrange = Callable[[dict[str, NDArray[Any]]], dict[str, NDArray[Any]]]


def plain(_: str) -> Type:
    return Type.F32


def quantized(kind: Type) -> TypeOf:
    """All matrices in this type."""
    return lambda name: kind if name.endswith(".weight") and "norm" not in name else Type.F32


def write_gguf(
    path: Path,
    model: Any,
    type_of: TypeOf = plain,
    *,
    tokenizer: Path | None = None,
    num_parts: int = 1,
    metadata: Mapping[str, Any] | None = None,
    arrange: Arrange = dict,
) -> Path:
    """A model of transformers as one file, or the first of several.

    tokenizer: a directory that has one; else there is one of a letter a token. A matrix whose rows
    do not fit its type is float16, as in llama.cpp. metadata: strings, integers and numbers
    besides, which replace others.
    """
    config = text_config(model)
    name = gguf.MODEL_ARCH_NAMES[_architecture(model)]
    tensors = arrange(dict(_tensors(model)))
    part_size = math.ceil(len(tensors) / num_parts) if num_parts > 1 else 0
    writer = GGUFWriter(path, name, split_max_tensors=part_size)
    _add_settings(writer, config, name)
    if tokenizer:
        _add_tokenizer(writer, tokenizer)
    else:
        _add_letters(writer, config.vocab_size)
    for key, value in (metadata or {}).items():
        for part in writer.kv_data:
            part.pop(key, None)
        _add(writer, key, value)
    for tensor_name, values in tensors.items():
        kind = type_of(tensor_name) if values.ndim > 1 else Type.F32
        if values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = Type.F16
        packed = quantized_blocks(values, kind)
        writer.add_tensor(tensor_name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if num_parts > 1:
        return path.with_name(f"{path.stem}-00001-of-{num_parts:05}.gguf")
    return path


def load_transformers(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def with_fused_heads(tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Queries, keys and values of a layer as one tensor, as by the converter's --fuse-qkv."""
    fused = {name: values for name, values in tensors.items() if ".attn_q." not in name}
    for name in [name for name in tensors if ".attn_q." in name]:
        parts = [fused.pop(name.replace("_q.", f"_{kind}."), tensors[name]) for kind in "qkv"]
        fused[name.replace("_q.", "_qkv.")] = np.concatenate(parts)
    return fused


def with_gates_apart(tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The gates of experts, and what they are multiplied with, as a tensor each."""
    apart = dict(tensors)
    for name in [name for name in tensors if "gate_up_exps" in name]:
        halves = np.split(apart.pop(name), 2, axis=1)
        for kind, values in zip(("gate", "up"), halves, strict=True):
            apart[name.replace("gate_up", kind)] = np.ascontiguousarray(values)
    return apart


def text_config(model: Any) -> Any:
    """That of the text model, of a model of text and images."""
    return model.config.get_text_config()


def _architecture(model: Any) -> gguf.MODEL_ARCH:
    """llama.cpp has one for both text models of Mistral3."""
    is_mistral3 = model.config.model_type == "mistral3"
    kind = "ministral3" if is_mistral3 else text_config(model).model_type
    return ARCHITECTURES[kind]


def _tensors(model: Any) -> Iterable[tuple[str, NDArray[np.float32]]]:
    """Those of the text model, changed as llama.cpp's conversion/*.py change them."""
    config, architecture = text_config(model), _architecture(model)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    yield from _rope_tensors(model, config)
    for given, tensor in model.state_dict().items():
        given = given.replace("language_model.", "")
        is_tied_head = given == "lm_head.weight" and config.tie_word_embeddings
        if not given.startswith(_TEXT) or is_tied_head:
            continue
        for name, values in converted(config, given, tensor.float().numpy()):
            yield _converted(names, config, architecture, name, values)


def _converted(
    names: gguf.TensorNameMap,
    config: Any,
    architecture: gguf.MODEL_ARCH,
    name: str,
    values: NDArray[np.float32],
) -> tuple[str, NDArray[np.float32]]:
    if architecture in _PERMUTED and ("q_proj." in name or "k_proj." in name):
        values = permuted(values, _head_dim(config))
    if architecture is gguf.MODEL_ARCH.GEMMA3 and name.endswith("norm.weight"):
        values = values + 1
    if name.endswith("router.scale"):
        return f"blk.{name.split('.')[2]}.ffn_gate_inp.scale", values
    if name.endswith("router.per_expert_scale"):
        return f"blk.{name.split('.')[2]}.ffn_down_exps.scale", values
    if not name.endswith((".weight", ".bias", "A_log")):
        name += ".weight"
    stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert stored, name
    return stored, values


def permuted(values: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """The rows of each head's halves in turns."""
    halves = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _head_dim(config: Any) -> int:
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def _rope_tensors(model: Any, config: Any) -> Iterable[tuple[str, NDArray[np.float32]]]:
    rope = config.rope_parameters
    if config.model_type.startswith("gemma4"):
        half = _full_heads(config)[0] // 2
        num = int(half * rope[_FULL]["partial_rotary_factor"])
        yield "rope_freqs.weight", np.array([1.0] * num + [1e30] * (half - num), np.float32)
    elif rope.get("rope_type") == "llama3":
        head_dim = _head_dim(config)
        default = 1 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)
        scaled = model.model.rotary_emb.inv_freq
        yield "rope_freqs.weight", (default / scaled).float().numpy()
    elif rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            yield f"rope_factors_{length}.weight", factors


def _add_settings(writer: GGUFWriter, config: Any, architecture: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture == "gemma4":
        _add_gemma4(writer, config)
    else:
        if size := getattr(config, "intermediate_size", None):
            writer.add_feed_forward_length(size)
        has_latents = architecture == "deepseek2"
        writer.add_head_count_kv(1 if has_latents else config.num_key_value_heads)
        head_dim = (
            None if has_latents or architecture == "phi3" else getattr(config, "head_dim", None)
        )
        if head_dim:
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
            if architecture not in ("gemma3", "olmo2", "seed_oss", "exaone4", *WITH_PARTS):
                writer.add_rope_dimension_count(head_dim)
    _add_rope(writer, config)
    add_settings(writer, config)
    window = getattr(config, "sliding_window", None)
    if architecture == "phi3":
        writer.add_sliding_window(window or 0)
        share = config.rope_parameters.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(_head_dim(config) * share))
    elif window and architecture in ("llama", "gemma3", "olmo2", "exaone4"):
        writer.add_sliding_window(window)
        if architecture not in ("llama", "gemma3"):
            writer.add_sliding_window_pattern([kind == _SLIDING for kind in config.layer_types])
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if softcap := getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(softcap)


def _full_heads(config: Any) -> tuple[int, int]:
    """The size and the number of KV heads of Gemma 4's layers without a window."""
    settings = config.to_dict()
    full = config.layer_types.index(_FULL)
    by_layer = {int(index): dict(own) for index, own in settings["per_layer_config"].items()}
    own = settings | by_layer.get(full, {})
    return own["head_dim"], own["num_key_value_heads"]


def _add_gemma4(writer: GGUFWriter, config: Any) -> None:
    are_sliding = [kind == _SLIDING for kind in config.layer_types]
    settings, (head_dim, num_kv_heads) = config.to_dict(), _full_heads(config)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_key_length_swa(settings["head_dim"])
    writer.add_value_length_swa(settings["head_dim"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_dimension_count_swa(settings["head_dim"])
    size, first = config.intermediate_size, config.num_hidden_layers - config.num_kv_shared_layers
    sizes = [size * (1 + (i >= first)) for i in range(config.num_hidden_layers)]
    writer.add_feed_forward_length(sizes if config.use_double_wide_mlp else size)
    own = settings["num_key_value_heads"]
    heads = [own if each else num_kv_heads for each in are_sliding]
    writer.add_head_count_kv(own if num_kv_heads == own else heads)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(are_sliding)
    if getattr(config, "enable_moe_block", False):  # not of the unified one
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add_rope(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    if _FULL in rope:
        writer.add_rope_freq_base_swa(rope[_SLIDING]["rope_theta"])
        rope = rope[_FULL]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "longrope":
        trained = rope["original_max_position_embeddings"]
        scale = max(config.max_position_embeddings / trained, 1)
        factor = math.sqrt(1 + math.log(scale) / math.log(trained))
        writer.add_rope_scaling_orig_ctx_len(trained)
        writer.add_rope_scaling_attn_factors(factor)


def _add_letters(writer: GGUFWriter, vocab_size: int) -> None:
    tokens = [f"<{index}>" for index in range(vocab_size)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * vocab_size)
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab_size)
    writer.add_eos_token_id(2)


def _add_tokenizer(writer: GGUFWriter, directory: Path) -> None:
    """As llama.cpp's converter does it for the tokenizers of the demo model and of stories260K."""
    spec = json.loads((directory / "tokenizer.json").read_text())
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    added = {each["content"]: each["id"] for each in spec["added_tokens"]}
    vocabulary = spec["model"]["vocab"] | added
    tokens = sorted(vocabulary, key=lambda token: int(vocabulary[token]))
    is_byte_level = not spec["model"]["byte_fallback"]
    kinds = [_token_kind(token, added, is_byte_level=is_byte_level) for token in tokens]
    writer.add_tokenizer_model("gpt2" if is_byte_level else "llama")
    writer.add_tokenizer_pre("smollm" if is_byte_level else "default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if is_byte_level:
        merges = spec["model"]["merges"]
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    else:
        writer.add_token_scores([-float(token_id) for token_id in range(len(tokens))])
    for kind in ("bos", "eos", "unk", "pad"):
        token = settings.get(f"{kind}_token")
        if token is not None:
            getattr(writer, f"add_{kind}_token_id")(vocabulary[token])
    writer.add_add_bos_token(spec["post_processor"] is not None)
    if template := settings.get("chat_template"):
        writer.add_chat_template(template)


def _token_kind(token: str, added: Mapping[str, int], *, is_byte_level: bool) -> gguf.TokenType:
    if token in added:
        return gguf.TokenType.CONTROL
    is_byte = not is_byte_level and token.startswith("<0x") and len(token) == 6
    return gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)
