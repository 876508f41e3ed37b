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

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
# Of a tensor, by its name in the file.
TypeOf = Callable[[str], Type]


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
) -> Path:
    """A model of transformers as one file, or the first of several.

    tokenizer: a directory that has one; else there is one of a letter a token. A matrix whose rows
    do not fit its type is float16, as in llama.cpp. metadata: strings, integers and numbers
    besides, which replace others.
    """
    config = model.config
    name = gguf.MODEL_ARCH_NAMES[_ARCHITECTURES[config.model_type]]
    part_size = math.ceil(_num_tensors(model) / num_parts) if num_parts > 1 else 0
    writer = GGUFWriter(path, name, split_max_tensors=part_size)
    _add_settings(writer, config)
    if tokenizer:
        _add_tokenizer(writer, tokenizer)
    else:
        _add_letters(writer, config.vocab_size)
    for key, value in (metadata or {}).items():
        for part in writer.kv_data:
            part.pop(key, None)
        _add(writer, key, value)
    for tensor_name, values in _tensors(model):
        kind = type_of(tensor_name)
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


def _num_tensors(model: Any) -> int:
    return len(list(_tensors(model)))


def _tensors(model: Any) -> Iterable[tuple[str, NDArray[np.float32]]]:
    config = model.config
    architecture = _ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    if rope["rope_type"] == "llama3":
        default = 1 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)
        scaled = model.model.rotary_emb.inv_freq
        yield "rope_freqs.weight", (default / scaled).float().numpy()
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if architecture is gguf.MODEL_ARCH.LLAMA and ("q_proj." in name or "k_proj." in name):
            halves = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored, name
        yield stored, values


def _add_settings(writer: GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.model_type == "mistral" and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)


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
