"""The families of encoders of text: models whose tokens attend to later ones too, and that give a
vector for a text. Source of all facts: the classes of transformers with these names."""

from dataclasses import replace
from functools import partial

from penstock.engine.files.json_file import Fields
from penstock.engine.models.families.outline import Design, Family, Ropes, one_rope, ropes_by_kind
from penstock.engine.models.parts.attention.rope import RopeConfig, RopeSettings
from penstock.engine.models.parts.attention.windows import Windows, full_every, no_window
from penstock.engine.models.parts.layer import Layer
from penstock.engine.models.parts.tensors import NormKind

# Every token attends to all of its text.
_BOTH_SIDES = {"has_spans": True, "is_two_sided": True}
_BIASES = {"qkv_bias": True, "output_bias": True}
_SUMS = {"pre": False, "of_sums": True, "has_bias": True}
_WITHOUT_EFFECT = frozenset(
    {
        *("position_embedding_type", "add_cross_attention", "is_decoder", "directionality"),
        *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_type"),
        *("pooler_size_per_head", "position_biased_input", "tie_word_embeddings", "is_causal"),
    }
)


def _without_rope(fields: Fields, head_dim: int, windows: Windows) -> Ropes:
    return Ropes(rope=RopeConfig(theta=1.0), by_layer=(None,) * len(windows))


def _read(
    fields: Fields, design: Design, *, has_positions: bool, pads_first: bool = False
) -> Design:
    """has_positions: whether tokens have rows by their position. pads_first: whether these begin
    after the row of the padding's id, which has none itself."""
    kind = fields.text("position_embedding_type")
    if has_positions and kind not in ("absolute", None):
        raise fields.wrong("position_embedding_type", "'absolute'", kind)
    num_positions = fields.count("max_position_embeddings") if has_positions else 0
    first = fields.count("pad_token_id", default=0, least=0) + 1 if pads_first else 0
    embedding = {
        "num_positions": num_positions,
        "first_position": first,
        "num_types": fields.count("type_vocab_size", default=2, least=0),
        "has_norm": True,
        "has_norm_bias": True,
    }
    norm = NormKind(eps=fields.number("layer_norm_eps", 1e-12), is_centred=True)
    return replace(design, embedding=embedding, norm=norm)


def _modern(fields: Fields, design: Design) -> Design:
    """The first layer's attention reads what is embedded, which has a norm."""
    has_bias = fields.flag("norm_bias")

    def by_layer(index: int, layer: Layer) -> Layer:
        return layer if index else replace(layer, norms=replace(layer.norms, has_input=False))

    return replace(
        design,
        embedding={"has_norm": True, "has_norm_bias": has_bias},
        head={"has_norm_bias": has_bias},
        norms={"has_bias": has_bias},
        norm=NormKind(eps=fields.number("norm_eps", 1e-5), is_centred=True),
        by_layer=by_layer,
    )


def _modern_windows(fields: Fields, num_layers: int) -> Windows:
    """local_attention counts the positions on both sides."""
    interval = fields.count("global_attn_every_n_layers", default=3)
    half = fields.count("local_attention", default=128) // 2
    windowed = fields.with_defaults({"sliding_window": half + 1})
    return full_every(interval, windowed, num_layers, first=0)


def _modern_ropes(fields: Fields, head_dim: int, windows: Windows) -> Ropes:
    thetas = {"rope_theta": fields.number("global_rope_theta", 160_000.0)}
    local_theta = fields.number("local_rope_theta", 10_000.0)
    return ropes_by_kind(fields.with_defaults(thetas), head_dim, windows, local_theta=local_theta)


def _gte(fields: Fields, design: Design) -> Design:
    """The code that the model came with has settings that transformers' has not."""
    for name, only in (("layer_norm_type", "layer_norm"), ("position_embedding_type", "rope")):
        if (given := fields.text(name)) not in (only, None):
            raise fields.wrong(name, repr(only), given)
    return _read(fields, design, has_positions=False)


def _gte_ropes(fields: Fields, head_dim: int, windows: Windows) -> Ropes:
    return Ropes(rope=RopeSettings(fields, {"ntk": "fixed_ntk"}).for_all_layers(head_dim))


_BERT = Family(
    architecture="BertModel",
    design=Design(
        attention={**_BOTH_SIDES, **_BIASES},
        attention_flags={},
        mlp={"has_gate": False, "has_bias": True},
        mlp_flags={},
        norms=_SUMS,
        head={"is_tied": True, "has_norm": False},
    ),
    read=partial(_read, has_positions=True),
    ropes=_without_rope,
    windows=no_window,
    activation="gelu",
    defaults={"vocab_size": 30522, "hidden_size": 768, "intermediate_size": 3072},
    without_effect=_WITHOUT_EFFECT,
)
_ROBERTA = replace(
    _BERT,
    architecture="RobertaModel",
    read=partial(_read, has_positions=True, pads_first=True),
    defaults={**_BERT.defaults, "vocab_size": 50265, "pad_token_id": 1},
)
# By model_type.
ENCODERS = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": replace(_ROBERTA, architecture="XLMRobertaModel"),
    "modernbert": Family(
        architecture="ModernBertModel",
        design=Design(attention=_BOTH_SIDES, head={"is_tied": True}),
        read=_modern,
        ropes=_modern_ropes,
        windows=_modern_windows,
        activation="gelu",
        has_fused_names=True,
        defaults={"vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152},
        without_effect=_WITHOUT_EFFECT
        | {
            *("classifier_pooling", "classifier_bias", "classifier_activation", "decoder_bias"),
            *("deterministic_flash_attn", "sparse_prediction", "sparse_pred_ignore_index"),
            *("repad_logits_with_grad", "reference_compile"),
        },
    ),
    "nomic_bert": Family(
        architecture="NomicBertModel",
        design=Design(
            attention={**_BOTH_SIDES, "is_fused": True},
            attention_flags={},
            mlp_flags={},
            norms=_SUMS,
            head={"is_tied": True, "has_norm": False},
        ),
        read=partial(_read, has_positions=False),
        ropes=one_rope,
        defaults={"vocab_size": 30528, "intermediate_size": 3072, "rope_theta": 1000.0},
        without_effect=_WITHOUT_EFFECT,
    ),
    "gte": Family(
        architecture="GteModel",
        design=Design(
            attention={**_BOTH_SIDES, **_BIASES},
            attention_flags={},
            mlp={"has_down_bias": True, "has_up_first": True},
            mlp_flags={},
            norms=_SUMS,
            head={"is_tied": True, "has_norm": False},
        ),
        read=_gte,
        ropes=_gte_ropes,
        activation="gelu",
        has_fused_names=True,
        defaults={"vocab_size": 250_048, "intermediate_size": 3072, "rope_theta": 160_000.0},
        without_effect=_WITHOUT_EFFECT
        | {"pack_qkv", "unpad_inputs", "use_memory_efficient_attention", "logn_attention_clip1"},
    ),
}
