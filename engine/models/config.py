"""A model's config.json in one form for all families. Imports no tensors."""

import dataclasses
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from penstock.engine.attention.shape import AttentionShape
from penstock.engine.memory.kv_shape import KVShape
from penstock.engine.models.errors import InvalidModel, UnsupportedFeature
from penstock.engine.models.formats import EXPERTS, unsupported_family
from penstock.engine.models.json_file import Fields, read_object, shown, shown_json
from penstock.engine.models.quantization.config import QuantizationConfig
from penstock.engine.models.quantization.parse import read_quantization

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: the base, and how its frequencies are scaled.

    kind `default` uses theta alone. `linear` divides every frequency by factor. `llama3` divides
    only the low ones, with a ramp between the two wavelengths that low_freq_factor and
    high_freq_factor set. `yarn` uses a ramp over the dimensions instead (its ends are integers if
    truncate), and multiplies cosines and sines by attention_factor. `longrope` divides each
    frequency by its own of `divisors`.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    attention_factor: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer like Llama: RMSNorm, rotary positions, gated SiLU.

    windows: for each layer, how many positions a token attends to, its own included, or None for
    all before it. quantization: None where all weights are plain. Fields with a default are
    `features`, in which families differ; a path that computes the layers itself names those that it
    knows, and refuses models with others.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    quantization: QuantizationConfig | None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def features(self) -> frozenset[str]:
        """The fields that have a default and another value."""
        return frozenset(
            field.name
            for field in dataclasses.fields(self)
            if field.default is not dataclasses.MISSING
            and getattr(self, field.name) != field.default
        )

    def check_features(self, path: str, supported: Set[str]) -> None:
        """path: its name in error messages. Raises UnsupportedFeature."""
        if unsupported := self.features - supported:
            raise UnsupportedFeature(unsupported, path)

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(
            num_layers=self.num_layers, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )

    def attention_shape(self, block_size: int) -> AttentionShape:
        return AttentionShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
        )

    @property
    def num_layers_by_window(self) -> dict[int | None, int]:
        """In the order in which the windows first occur."""
        return dict(Counter(self.windows))

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of one layer's matrices, by their names in a checkpoint."""
        hidden, mlp = self.hidden_size, self.intermediate_size
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }

    @property
    def num_layer_weights(self) -> int:
        """Elements of one layer's matrices."""
        return sum(rows * columns for rows, columns in self.linear_shapes.values())

    @property
    def num_layer_vectors(self) -> int:
        """Elements of one layer's norms and biases."""
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return (
            2 * self.hidden_size
            + 2 * self.head_dim * self.qk_norm
            + qkv * self.qkv_bias
            + self.hidden_size * self.output_bias
            + (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        )

    @property
    def num_step_weights(self) -> int:
        """Elements that a step reads: all but the embedding, unless it is the output layer too."""
        layer = self.num_layer_weights + self.num_layer_vectors
        return self.num_layers * layer + self.hidden_size * (self.vocab_size + 1)

    @property
    def num_parameters(self) -> int:
        embedding = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        return self.num_step_weights + embedding

    def weight_bytes(self, dtype_bytes: int, kept: Collection[str] | None = None) -> int:
        """Of all weights, before any is read: what a device needs for them.

        dtype_bytes: of the type in which they are computed. kept: the weight formats of linear
        layers that stay as they are stored, while others are made plain; None for all.
        """
        return self.num_parameters * dtype_bytes - self._saved_bytes(dtype_bytes, kept)

    def step_weight_bytes(self, dtype_bytes: int, kept: Collection[str] | None = None) -> int:
        """Of the weights that every step reads, as `ModelInfo.weight_bytes`."""
        return self.num_step_weights * dtype_bytes - self._saved_bytes(dtype_bytes, kept)

    @property
    def weight_formats(self) -> frozenset[str]:
        """Of the linear layers that are quantized in the checkpoint."""
        if self.quantization is None:
            return frozenset()
        schemes = (self.quantization.scheme_of(name) for name, _ in self._linears())
        return frozenset(scheme.weight_format for scheme in schemes if scheme is not None)

    def _saved_bytes(self, dtype_bytes: int, kept: Collection[str] | None) -> int:
        """How many fewer bytes the layers have that are quantized."""
        if self.quantization is None:
            return 0
        saved = 0
        for name, (rows, columns) in self._linears():
            scheme = self.quantization.scheme_of(name)
            if scheme is not None and (kept is None or scheme.weight_format in kept):
                saved += rows * columns * dtype_bytes - scheme.num_bytes(rows, columns)
        return saved

    def _linears(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """The name and shape of each matrix but the embedding."""
        for index in range(self.num_layers):
            for name, shape in self.linear_shapes.items():
                yield f"model.layers.{index}.{name}", shape
        if not self.tied_embeddings:
            yield "lm_head", (self.vocab_size, self.hidden_size)

    @classmethod
    def from_dir(cls, model_dir: Path) -> "ModelConfig":
        """Reads config.json, and generation_config.json where there is one.

        model_dir: or a GGUF file.
        """
        fields = Fields.read(model_dir / "config.json")
        family = _family(fields)
        quantization = read_quantization(fields, model_dir)
        for name in ("hidden_act", "hidden_activation"):
            if fields.text(name) not in ("silu", "swish", None):
                raise InvalidModel(
                    f"{fields.path} has {name} {shown(fields.get(name))}; only 'silu' is supported"
                )
        if not fields.flag("is_causal", default=True):
            raise InvalidModel(
                f"{fields.path} has is_causal: false, so tokens also attend to later ones, which "
                "is not supported; use a model with causal attention"
            )
        num_layers = fields.count("num_hidden_layers", most=_MAX_LAYERS)
        num_heads = fields.count("num_attention_heads", most=_MAX_HEADS)
        num_kv_heads = fields.count("num_key_value_heads", default=num_heads, most=_MAX_HEADS)
        hidden_size = fields.count("hidden_size", most=_MAX_WIDTH)
        # Qwen3's heads are wider than hidden_size / num_heads: 128 by default.
        head_dim = fields.count(
            "head_dim",
            default=128 if family == "qwen3" else hidden_size // num_heads,
            most=_MAX_HEAD_DIM,
        )
        _check_neutral(fields, family, head_dim)
        rope = _rope(fields, head_dim)
        attention_bias = fields.flag("attention_bias")
        vocab_size = fields.count("vocab_size", most=_MAX_VOCABULARY)
        if num_heads % num_kv_heads:
            raise InvalidModel(
                f"{fields.path}: num_attention_heads ({num_heads}) must be a multiple of "
                f"num_key_value_heads ({num_kv_heads})"
            )
        if head_dim % 2:
            raise InvalidModel(
                f"{fields.path}: head_dim is {head_dim}; it must be even, because rotary positions "
                "rotate pairs of dimensions"
            )
        return cls(
            family=family,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.count("intermediate_size", most=_MAX_WIDTH),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_model_len=_max_model_len(fields, rope),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope,
            windows=_FAMILIES[family].windows(fields, num_layers),
            tied_embeddings=fields.flag("tie_word_embeddings"),
            qkv_bias=attention_bias or family == "qwen2",
            output_bias=attention_bias and family != "qwen2",
            mlp_bias=fields.flag("mlp_bias"),
            qk_norm=family == "qwen3",
            eos_token_ids=_eos_token_ids(fields, model_dir / "generation_config.json", vocab_size),
            quantization=quantization,
        )


def _family(fields: Fields) -> str:
    architectures = fields.names("architectures") or []
    model_type = fields.text("model_type")
    family_of = {family.architecture: name for name, family in _FAMILIES.items()}
    for name in architectures:
        if name in family_of:
            return family_of[name]
    if not architectures and model_type in _FAMILIES:
        return str(model_type)
    raise unsupported_family(fields, architectures, model_type, list(family_of))


def _check_neutral(fields: Fields, family: str, head_dim: int) -> None:
    """Refuses a key that is not understood and is not at a value that changes nothing.

    transformers ignores most of these keys in our architectures; but a checkpoint that sets one was
    trained with it.
    """
    neutral = _NEUTRAL | {
        "attention_multiplier": (head_dim**-0.5,),
        "query_pre_attn_scalar": (head_dim,),
    }
    for name, allowed in neutral.items():
        value = None if name in _FAMILIES[family].understood else fields.get(name)
        if value is not None and not any(_equals(value, each) for each in allowed):
            raise InvalidModel(
                f"{fields.path} has {name}: {shown_json(value)}, which changes what the model "
                f"computes and is not supported; only "
                f"{' or '.join(map(json.dumps, (None, *allowed)))} is"
            )
    no_rope = fields.get("no_rope_layers")  # of each layer: 1 for rotary positions, 0 for none
    if no_rope is not None and not (isinstance(no_rope, list) and all(n == 1 for n in no_rope)):
        raise InvalidModel(
            f"{fields.path} has no_rope_layers: {shown_json(no_rope)}, and layers without rotary "
            "positions are not supported"
        )


def _equals(value: object, neutral: float) -> bool:
    try:
        return isinstance(value, int | float) and math.isclose(value, neutral, rel_tol=1e-6)
    except OverflowError:  # an integer that no float can hold
        return False


def _rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    key, content = "rope_scaling", fields.mapping("rope_scaling")
    if newer := fields.mapping("rope_parameters"):
        key, content = "rope_parameters", newer
    if any(isinstance(value, dict) for value in content.values()):
        raise InvalidModel(
            f"{fields.path} has rotary positions that differ between layers, which is not "
            "supported; use a model with one rope_parameters for all layers"
        )
    scaling = Fields(f"{fields.path}: {key}", content)
    theta = scaling.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if theta <= 1:  # the frequencies would not fall
        raise InvalidModel(f"{fields.path}: 'rope_theta' must be more than 1, not {theta:g}")
    kind = scaling.text("rope_type") or scaling.text("type") or "default"
    for name, neutral in _NEUTRAL_ROPE.items():
        value = scaling.get(name)
        if value is not None and not _equals(value, neutral):
            raise InvalidModel(
                f"{fields.path} has rotary positions with {name}: {shown_json(value)}, which is "
                f"not supported; only {json.dumps(neutral)} is"
            )
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=scaling.number("factor"))
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if high <= low:
            raise InvalidModel(
                f"{scaling.path}: 'high_freq_factor' ({high:g}) must be more than "
                f"'low_freq_factor' ({low:g})"
            )
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=scaling.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_positions=scaling.count("original_max_position_embeddings"),
        )
    if kind == "yarn":
        return _yarn(fields, theta, scaling)
    # As a GGUF file has llama3's: with factors that are the same for all lengths.
    factors = scaling.get("long_factor")
    if kind == "longrope" and factors and factors == scaling.get("short_factor"):
        return _longrope(theta, scaling, head_dim)
    raise InvalidModel(
        f"{fields.path} has {shown(kind)} rope scaling; "
        "supported are 'default', 'linear', 'llama3' and 'yarn'"
    )


def _longrope(theta: float, scaling: Fields, head_dim: int) -> RopeConfig:
    factors = scaling.get("long_factor")
    if (
        not isinstance(factors, list)
        or len(factors) != head_dim // 2
        or not all(isinstance(each, float) and 1e-6 < each < 1e6 for each in factors)
    ):
        raise scaling.wrong("long_factor", f"{head_dim // 2} positive numbers", factors)
    return RopeConfig(
        theta=theta,
        kind="longrope",
        divisors=tuple(factors),
        attention_factor=scaling.number("attention_factor"),
    )


def _yarn(fields: Fields, theta: float, scaling: Fields) -> RopeConfig:
    """The defaults are those of transformers and of Peng et al. 2023 (arXiv:2309.00071)."""
    factor = scaling.number("factor")
    mscale, mscale_all_dim = 1.0, 0.0
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        mscale, mscale_all_dim = scaling.number("mscale"), scaling.number("mscale_all_dim")
    growth = 0.1 * math.log(max(factor, 1.0))
    trained = fields.count(
        "original_max_position_embeddings", default=fields.count("max_position_embeddings")
    )
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        low_freq_factor=scaling.number("beta_slow", 1.0) if scaling.get("beta_slow") else 1.0,
        high_freq_factor=scaling.number("beta_fast", 32.0) if scaling.get("beta_fast") else 32.0,
        original_max_positions=scaling.count("original_max_position_embeddings", default=trained),
        attention_factor=scaling.number(
            "attention_factor", (1 + mscale * growth) / (1 + mscale_all_dim * growth)
        ),
        truncate=scaling.flag("truncate", default=True),
    )


def _max_model_len(fields: Fields, rope: RopeConfig) -> int:
    """With YaRN, max_position_embeddings is mostly still the length that was trained on."""
    trained = fields.count("max_position_embeddings")
    if rope.kind != "yarn":
        return trained
    longest = rope.original_max_positions * rope.factor
    if longest > _MAX_POSITIONS:
        raise InvalidModel(
            f"{fields.path} has yarn rope scaling to {longest:.3g} positions; at most "
            f"{_MAX_POSITIONS:,} are supported: lower its factor"
        )
    return max(trained, int(longest))


def _all_or_none(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Mistral: one window for every layer, or null for none. The default is that of transformers,
    4,096 as in the first Mistral."""
    window = 4096 if "sliding_window" not in fields else fields.get("sliding_window")
    if window is not None:
        window = fields.count("sliding_window", default=window)
    _check_layer_types(fields, "full_attention" if window is None else "sliding_attention")
    return (window,) * num_layers


def _by_layer(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Qwen: none unless use_sliding_window, and then in the layers that layer_types names."""
    window = fields.get("sliding_window") if fields.flag("use_sliding_window") else None
    if window is not None:
        window = fields.count("sliding_window")
    first = fields.count("max_window_layers", default=28, least=0)
    kinds = fields.names("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    if len(kinds) != num_layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise InvalidModel(
            f"{fields.path}: layer_types must be 'full_attention' or 'sliding_attention' for each "
            f"of {num_layers} layers; other kinds are not supported"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _no_window(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    _check_layer_types(fields, "full_attention")
    return (None,) * num_layers


def _check_layer_types(fields: Fields, kind: str) -> None:
    """For a family whose layers are all of one kind."""
    kinds = fields.names("layer_types")
    if kinds is not None and not set(kinds) <= {kind}:
        raise InvalidModel(
            f"{fields.path} has layer_types other than {kind!r}, which is not supported for "
            "this architecture"
        )


def _eos_token_ids(config: Fields, path: Path, vocab_size: int) -> tuple[int, ...]:
    """Every id that ends the output: from generation_config.json, or else from config.json."""
    generation = Fields(path, read_object(path))
    of_config, of_generation = _token_ids(config), _token_ids(generation)
    ids = of_config if of_generation is None else of_generation
    # The model cannot generate others; some fine-tunes name a token that was never added.
    if unknown := [token_id for token_id in ids or () if token_id >= vocab_size]:
        logger.warning(
            "eos_token_id %s of %s is outside of the vocabulary of %d tokens, and has no effect",
            shown(unknown[0]),
            path.parent,
            vocab_size,
        )
    return tuple(token_id for token_id in ids or () if token_id < vocab_size)


def _token_ids(fields: Fields) -> list[int] | None:
    """Those of eos_token_id; None if it is absent."""
    ids = fields.get("eos_token_id")
    if ids is None:
        return None
    each = ids if isinstance(ids, list) else [ids]
    for token_id in each:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise fields.wrong("eos_token_id", "a token id or a list of them", ids)
    return each


class _Family(NamedTuple):
    """architecture: its name in transformers. understood: the keys of `_NEUTRAL` that it reads, or
    that have no effect on it."""

    architecture: str
    windows: Callable[[Fields, int], tuple[int | None, ...]] = _no_window
    understood: tuple[str, ...] = ()


# By model_type.
_FAMILIES = {
    "llama": _Family("LlamaForCausalLM"),
    "mistral": _Family("MistralForCausalLM", _all_or_none),
    "qwen2": _Family("Qwen2ForCausalLM", _by_layer),
    "qwen3": _Family("Qwen3ForCausalLM", _by_layer, understood=("use_qk_norm", "qk_layernorm")),
}

# Far more than any model has: absurd sizes are refused before anything is allocated for them.
_MAX_LAYERS = 10_000
_MAX_HEADS = 2**16
_MAX_HEAD_DIM = 2**16
_MAX_WIDTH = 2**22
_MAX_VOCABULARY = 2**24
_MAX_POSITIONS = 2**31 - 1

_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap")
_MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "scale_emb",
)
# Keys of other architectures (mixtures of experts, Gemma 2, Granite, Cohere, MiniCPM, Llama 4, ...)
# which change the answer, and the values, besides null, at which they do not.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(EXPERTS, (0, 1)),
    **dict.fromkeys(_SOFTCAPS, (0,)),
    **dict.fromkeys(_MULTIPLIERS, (1,)),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "clip_qkv": (),
    "attention_chunk_size": (),
    "attn_temperature_tuning": (False,),
    "alibi": (False,),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1,),
}
# Neutral values within rope_parameters and rope_scaling, null aside.
_NEUTRAL_ROPE = {"partial_rotary_factor": 1, "llama_4_scaling_beta": 0}
