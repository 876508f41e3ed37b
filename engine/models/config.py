"""A model's config.json in one form for all families. Imports no tensors."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock.engine.attention.shape import AttentionShape
from penstock.engine.memory.kv_shape import KVShape
from penstock.engine.models.errors import InvalidModel, UnsupportedFeature


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: the base, and how its frequencies are scaled.

    kind `default` uses theta alone. `linear` divides every frequency by factor. `llama3` divides
    only the low ones, with a ramp between the two wavelengths that low_freq_factor and
    high_freq_factor set. `yarn` uses a ramp over the dimensions instead (its ends are integers if
    truncate), and multiplies cosines and sines by attention_factor.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer like Llama: RMSNorm, rotary positions, gated SiLU.

    windows: for each layer, how many positions a token attends to, its own included, or None for
    all before it. Fields with a default are `features`, in which families differ; a path that
    computes the layers itself names those that it knows, and refuses models with others.
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
    def num_layer_weights(self) -> int:
        """Elements of one layer's matrices."""
        attention = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return self.hidden_size * (attention + 3 * self.intermediate_size)

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

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Of all weights, before any is read: what a device needs for them.

        dtype_bytes: of the type in which they are computed.
        """
        return self.num_parameters * dtype_bytes

    def step_weight_bytes(self, dtype_bytes: int) -> int:
        """Of the weights that every step reads, as `ModelInfo.weight_bytes`."""
        return self.num_step_weights * dtype_bytes

    @classmethod
    def from_dir(cls, model_dir: Path) -> "ModelConfig":
        """Reads config.json, and generation_config.json where there is one."""
        fields = _Fields(model_dir / "config.json")
        family = _family(fields)
        for name in _QUANTIZATION:
            if fields.get(name) is not None:
                raise InvalidModel(
                    f"{fields.path} has a {name}, and quantized weights are not "
                    "supported; use the float32, float16 or bfloat16 version of the model"
                )
        for name in ("hidden_act", "hidden_activation"):
            if fields.get(name, "silu") not in ("silu", "swish", None):
                raise InvalidModel(
                    f"{fields.path} has {name} {fields.get(name)!r}; only 'silu' is supported"
                )
        if fields.get("is_causal") is False:
            raise InvalidModel(
                f"{fields.path} has is_causal: false, so tokens also attend to later ones, which "
                "is not supported; use a model with causal attention"
            )
        rope = _rope(fields)
        num_layers = fields.count("num_hidden_layers")
        num_heads = fields.count("num_attention_heads")
        num_kv_heads = fields.count("num_key_value_heads", default=num_heads)
        hidden_size = fields.count("hidden_size")
        # Qwen3's heads are wider than hidden_size / num_heads: 128 by default.
        head_dim = fields.count(
            "head_dim", default=128 if family == "qwen3" else hidden_size // num_heads
        )
        _check_neutral(fields, family, head_dim)
        attention_bias = bool(fields.get("attention_bias", False))
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
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.count("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_model_len=_max_model_len(fields, rope),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope,
            windows=_FAMILIES[family].windows(fields, num_layers),
            tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or family == "qwen2",
            output_bias=attention_bias and family != "qwen2",
            mlp_bias=bool(fields.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            eos_token_ids=_eos_token_ids(fields, model_dir / "generation_config.json"),
        )


class _Fields:
    """A JSON object in a file. Errors about its fields name the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InvalidModel(
                f"{path} does not exist; a model directory in Hugging Face's layout has one"
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InvalidModel(f"{path} is not valid JSON: {error}") from None
        if not isinstance(content, dict):
            raise InvalidModel(f"{path} must hold a JSON object, not {type(content).__name__}")
        self._content = content

    def get(self, name: str, default: Any = None) -> Any:
        return self._content.get(name, default)

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer; null counts as absent, as transformers writes it."""
        value = self._content.get(name)
        if value is None:
            value = default
        if value is None:
            raise InvalidModel(f"{self.path} lacks the field {name!r}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidModel(f"{self.path}: {name!r} must be a positive integer, not {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive number; null counts as absent."""
        value = self._content.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise InvalidModel(f"{self.path}: {name!r} must be a positive number, not {value!r}")
        return float(value)


def _family(fields: _Fields) -> str:
    architectures = fields.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise InvalidModel(
            f"{fields.path}: 'architectures' must be a list of names, not {architectures!r}"
        )
    family_of = {family.architecture: name for name, family in _FAMILIES.items()}
    for name in architectures:
        if name in family_of:
            return family_of[name]
    if not architectures and fields.get("model_type") in _FAMILIES:
        return str(fields.get("model_type"))
    named = ", ".join(map(str, architectures)) or fields.get("model_type") or "(none)"
    raise InvalidModel(
        f"{fields.path} names the architecture {named}, which is not supported; "
        f"supported are {', '.join(family_of)}"
    )


def _check_neutral(fields: _Fields, family: str, head_dim: int) -> None:
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
                f"{fields.path} has {name}: {json.dumps(value)}, which changes what the model "
                f"computes and is not supported; only "
                f"{' or '.join(map(json.dumps, (None, *allowed)))} is"
            )
    no_rope = fields.get("no_rope_layers")  # of each layer: 1 for rotary positions, 0 for none
    if no_rope is not None and not (isinstance(no_rope, list) and all(no_rope)):
        raise InvalidModel(
            f"{fields.path} has no_rope_layers: {json.dumps(no_rope)}, and layers without rotary "
            "positions are not supported"
        )


def _equals(value: object, neutral: float) -> bool:
    return isinstance(value, int | float) and math.isclose(value, neutral, rel_tol=1e-6)


def _rope(fields: _Fields) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise InvalidModel(
            f"{fields.path}: rope_parameters and rope_scaling must be an object or null, "
            f"not {scaling!r}"
        )
    theta = float(scaling.get("rope_theta") or fields.number("rope_theta", 10_000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if any(isinstance(value, dict) for value in scaling.values()):
        raise InvalidModel(
            f"{fields.path} has rotary positions that differ between layers, which is not "
            "supported; use a model with one rope_parameters for all layers"
        )
    for name, neutral in _NEUTRAL_ROPE.items():
        value = scaling.get(name)
        if value is not None and not _equals(value, neutral):
            raise InvalidModel(
                f"{fields.path} has rotary positions with {name}: {json.dumps(value)}, which is "
                f"not supported; only {json.dumps(neutral)} is"
            )
    try:
        if kind == "default":
            return RopeConfig(theta=theta)
        if kind == "linear":
            return RopeConfig(theta=theta, kind=kind, factor=float(scaling["factor"]))
        if kind == "llama3":
            return RopeConfig(
                theta=theta,
                kind=kind,
                factor=float(scaling["factor"]),
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
                original_max_positions=int(scaling["original_max_position_embeddings"]),
            )
        if kind == "yarn":
            return _yarn(fields, theta, scaling)
    except KeyError as error:
        raise InvalidModel(
            f"{fields.path} has {kind!r} rope scaling but lacks its field {error}"
        ) from None
    except (TypeError, ValueError) as error:
        raise InvalidModel(
            f"{fields.path} has {kind!r} rope scaling with a field that is not a number: {error}"
        ) from None
    raise InvalidModel(
        f"{fields.path} has {kind!r} rope scaling; "
        "supported are 'default', 'linear', 'llama3' and 'yarn'"
    )


def _yarn(fields: _Fields, theta: float, scaling: dict[str, Any]) -> RopeConfig:
    """The defaults are those of transformers and of Peng et al. 2023 (arXiv:2309.00071)."""
    factor = float(scaling["factor"])
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if not (mscale and mscale_all_dim):
            mscale, mscale_all_dim = 1.0, 0.0
        growth = 0.1 * math.log(max(factor, 1.0))
        attention_factor = (1 + mscale * growth) / (1 + mscale_all_dim * growth)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        low_freq_factor=float(scaling.get("beta_slow") or 1),
        high_freq_factor=float(scaling.get("beta_fast") or 32),
        original_max_positions=int(
            scaling.get("original_max_position_embeddings")
            or fields.get("original_max_position_embeddings")
            or fields.count("max_position_embeddings")
        ),
        attention_factor=float(attention_factor),
        truncate=bool(scaling.get("truncate", True)),
    )


def _max_model_len(fields: _Fields, rope: RopeConfig) -> int:
    """With YaRN, max_position_embeddings is mostly still the length that was trained on."""
    trained = fields.count("max_position_embeddings")
    return max(trained, int(rope.original_max_positions * rope.factor) * (rope.kind == "yarn"))


def _all_or_none(fields: _Fields, num_layers: int) -> tuple[int | None, ...]:
    """Mistral: one window for every layer, or null for none. The default is that of transformers,
    4,096 as in the first Mistral."""
    window = fields.get("sliding_window", 4096)
    if window is not None:
        window = fields.count("sliding_window", default=window)
    _check_layer_types(fields, "full_attention" if window is None else "sliding_attention")
    return (window,) * num_layers


def _by_layer(fields: _Fields, num_layers: int) -> tuple[int | None, ...]:
    """Qwen: none unless use_sliding_window, and then in the layers that layer_types names."""
    window = fields.get("sliding_window") if fields.get("use_sliding_window", False) else None
    if window is not None:
        window = fields.count("sliding_window")
    first = fields.get("max_window_layers", 28)
    kinds = fields.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    if len(kinds) != num_layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise InvalidModel(
            f"{fields.path}: layer_types must be 'full_attention' or 'sliding_attention' for each "
            f"of {num_layers} layers; other kinds are not supported"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _no_window(fields: _Fields, num_layers: int) -> tuple[int | None, ...]:
    _check_layer_types(fields, "full_attention")
    return (None,) * num_layers


def _check_layer_types(fields: _Fields, kind: str) -> None:
    """For a family whose layers are all of one kind."""
    kinds = fields.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and set(kinds) <= {kind}):
        raise InvalidModel(
            f"{fields.path} has layer_types other than {kind!r}, which is not supported for "
            "this architecture"
        )


def _eos_token_ids(config: _Fields, generation_config: Path) -> tuple[int, ...]:
    """Every id that ends the output: from generation_config.json, or else from config.json."""
    ids, path = None, generation_config
    if generation_config.exists():
        ids = _Fields(generation_config).get("eos_token_id")
    if ids is None:
        ids, path = config.get("eos_token_id"), config.path
    if ids is None:
        return ()
    each = ids if isinstance(ids, list) else [ids]
    for token_id in each:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise InvalidModel(
                f"{path}: 'eos_token_id' must be a token id or a list of them, not {ids!r}"
            )
    return tuple(each)


class _Family(NamedTuple):
    """architecture: its name in transformers. understood: the keys of `_NEUTRAL` that it reads, or
    that have no effect on it."""

    architecture: str
    windows: Callable[[_Fields, int], tuple[int | None, ...]] = _no_window
    understood: tuple[str, ...] = ()


# By model_type.
_FAMILIES = {
    "llama": _Family("LlamaForCausalLM"),
    "mistral": _Family("MistralForCausalLM", _all_or_none),
    "qwen2": _Family("Qwen2ForCausalLM", _by_layer),
    "qwen3": _Family("Qwen3ForCausalLM", _by_layer, understood=("use_qk_norm", "qk_layernorm")),
}

# How checkpoints announce quantized weights; `quantization` is MLX's.
_QUANTIZATION = ("quantization_config", "compression_config", "quantization")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
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
    **dict.fromkeys(_EXPERTS, (0, 1)),
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
