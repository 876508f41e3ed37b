"""What encoders of text call their tensors, by the names that the parts of a model declare.

Each style is that of a class of transformers, or of the code that a model came with before it.
"""

import re
from collections.abc import Container

# The tensor by which a style is recognized, after its prefix, and in turns patterns of declared
# names and what they become.
_Style = tuple[str, tuple[tuple[str, str], ...]]
_EMBEDDINGS = (
    (r"^model\.embed_tokens", "embeddings.word_embeddings"),
    (r"^model\.embed_positions", "embeddings.position_embeddings"),
    (r"^model\.embed_types", "embeddings.token_type_embeddings"),
    (r"^model\.pooler", "pooler"),
)
_NORM = (r"^model\.embed_norm", "embeddings.LayerNorm")
_BERT: _Style = (
    "encoder.layer.0.attention.self.query.weight",
    (
        *_EMBEDDINGS,
        _NORM,
        (r"^model\.layers\.", "encoder.layer."),
        (r"self_attn\.q_proj", "attention.self.query"),
        (r"self_attn\.k_proj", "attention.self.key"),
        (r"self_attn\.v_proj", "attention.self.value"),
        (r"self_attn\.o_proj", "attention.output.dense"),
        (r"post_attention_layernorm", "attention.output.LayerNorm"),
        (r"mlp\.up_proj", "intermediate.dense"),
        (r"mlp\.down_proj", "output.dense"),
        (r"output_layernorm", "output.LayerNorm"),
    ),
)
_MODERN: _Style = (
    "embeddings.tok_embeddings.weight",
    (
        (r"^model\.embed_tokens", "embeddings.tok_embeddings"),
        (r"^model\.embed_norm", "embeddings.norm"),
        (r"^model\.norm", "final_norm"),
        (r"^model\.layers\.", "layers."),
        (r"self_attn\.qkv_proj", "attn.Wqkv"),
        (r"self_attn\.o_proj", "attn.Wo"),
        (r"input_layernorm", "attn_norm"),
        (r"post_attention_layernorm", "mlp_norm"),
        (r"mlp\.gate_up_proj", "mlp.Wi"),
        (r"mlp\.down_proj", "mlp.Wo"),
    ),
)
_NOMIC: _Style = (
    "encoder.layers.0.attn.Wqkv.weight",
    (
        *_EMBEDDINGS,
        (r"^model\.embed_norm", "emb_ln"),
        (r"^model\.layers\.", "encoder.layers."),
        (r"self_attn\.qkv_proj", "attn.Wqkv"),
        (r"self_attn\.o_proj", "attn.out_proj"),
        (r"post_attention_layernorm", "norm1"),
        (r"output_layernorm", "norm2"),
        (r"mlp\.up_proj", "mlp.fc11"),
        (r"mlp\.gate_proj", "mlp.fc12"),
        (r"mlp\.down_proj", "mlp.fc2"),
    ),
)
_GTE: _Style = (
    "encoder.layer.0.attention.qkv_proj.weight",
    (
        *_EMBEDDINGS,
        _NORM,
        (r"^model\.layers\.", "encoder.layer."),
        (r"self_attn\.", "attention."),
        (r"post_attention_layernorm", "attn_ln"),
        (r"output_layernorm", "mlp_ln"),
        (r"mlp\.gate_up_proj", "mlp.up_gate_proj"),
    ),
)
_STYLES = (_BERT, _MODERN, _NOMIC, _GTE)
_PREFIXES = ("", "bert.", "roberta.", "model.", "nomic_bert.", "gte.", "new.")
# As TensorFlow's BERT had them.
_OLD = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


def encoder_name(name: str, names: Container[str]) -> str | None:
    """What a checkpoint with these names calls a tensor, or a layer; None where it is no encoder,
    or has no such tensor."""
    for marker, renamed in _STYLES:
        prefix = next((each for each in _PREFIXES if each + marker in names), None)
        if prefix is None:
            continue
        found = name
        for pattern, replacement in renamed:
            found = re.sub(pattern, replacement, found)
        found = prefix + found
        old = next((found.replace(*pair) for pair in _OLD.items() if found.endswith(pair[0])), "")
        return next((each for each in (found, old) if each in names), None)
    return None
