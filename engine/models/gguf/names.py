"""The tensors of a GGUF file, by the names that they have in Hugging Face's checkpoints."""

import re

from penstock.engine.models.config import ModelConfig

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"

# Besides those that a model computes with: frequencies of rotary positions, which older files have,
# and Llama 3's factors of them, which are read with the metadata.
UNUSED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
_OUTSIDE = {
    "model.embed_tokens.weight": EMBEDDING,
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": OUTPUT,
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

# Those that one layer is stacked of.
STACKED = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"))


def gguf_name(name: str) -> str:
    """name: as transformers has it, such as "model.layers.0.mlp.up_proj.weight"."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    index, _, rest = name.removeprefix("model.layers.").partition(".")
    layer, _, kind = rest.rpartition(".")
    return f"blk.{index}.{_IN_LAYER[layer]}.{kind}"


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that a file of this model must have."""
    hidden, mlp, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, kv = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, hidden),
        "output_norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes[OUTPUT] = (config.vocab_size, hidden)
    linears = {
        "attn_q": (query, hidden, config.qkv_bias),
        "attn_k": (kv, hidden, config.qkv_bias),
        "attn_v": (kv, hidden, config.qkv_bias),
        "attn_output": (hidden, query, config.output_bias),
        "ffn_gate": (mlp, hidden, config.mlp_bias),
        "ffn_up": (mlp, hidden, config.mlp_bias),
        "ffn_down": (hidden, mlp, config.mlp_bias),
    }
    norms = {"attn_norm": hidden, "ffn_norm": hidden}
    if config.qk_norm:
        norms |= {"attn_q_norm": head, "attn_k_norm": head}
    for index in range(config.num_layers):
        prefix = f"blk.{index}."
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes
