"""From config.json to a list of layers: `Family` is a row of the table of families, `Design` the
layers of one, and `Outline` reads what config.json says of every family's. Imports no tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.engine.files.json_file import Fields, is_number
from penstock.engine.memory.pool.kv_shape import KVHeads
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.parts.attention.config import Attention
from penstock.engine.models.parts.attention.rope import RopeConfig, RopeSettings, check_neutral
from penstock.engine.models.parts.attention.windows import FULL, SLIDING, Windows, no_window
from penstock.engine.models.parts.experts.config import MAX_WIDTH, Experts
from penstock.engine.models.parts.layer import Layer
from penstock.engine.models.parts.mlp.config import MLP, SILU, Activation
from penstock.engine.models.parts.norm.config import Norms
from penstock.engine.models.parts.per_layer_inputs.config import PerLayerInput, PerLayerInputs
from penstock.engine.models.parts.tensors import NormKind, Part

ACTIVATIONS = {
    "silu": SILU,
    "gelu_tanh": Activation(is_gelu=True),
    "gelu": Activation(is_gelu=True, is_exact=True),
}
# Far more than any model has: absurd sizes are refused before anything is allocated for them.
_MAX_LAYERS = 10_000
MAX_HEADS = 2**16
MAX_HEAD_DIM = 2**16
_MAX_VOCABULARY = 2**24

Settings = Mapping[str, Any]
_NORM = NormKind(eps=0.0)
# The fields of attention, and of the MLP, that keys of config.json set.
ATTENTION_BIASES = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
_MLP_BIASES = {"has_bias": "mlp_bias"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """In what the layers of a family differ from Llama's.

    attention, norms, mlp: fields of these parts, the same in all layers; embedding, head: likewise.
    attention_flags, mlp_flags: further fields, with the keys of config.json that set them. experts:
    what layers have in place of an MLP, or beside it; which ones, is have_experts, None for all.
    mixers: for each layer what it has in place of attention, or None; empty where all have
    attention. per_layer_inputs: None without. by_layer: gives a layer as it is, from its number and
    what it would be. norm: without its eps, where config.json has that.
    """

    attention: Settings = field(default_factory=dict)
    attention_flags: Mapping[str, str] = field(default_factory=ATTENTION_BIASES.copy)
    mlp_flags: Mapping[str, str] = field(default_factory=_MLP_BIASES.copy)
    norms: Settings = field(default_factory=dict)
    norm: NormKind = _NORM
    experts: Experts | None = None
    have_experts: tuple[bool, ...] | None = None
    mixers: tuple[Part | None, ...] = ()
    per_layer_inputs: PerLayerInputs | None = None
    by_layer: Callable[[int, Layer], Layer] | None = None
    mlp: Settings = field(default_factory=dict)
    embedding: Settings = field(default_factory=dict)
    head: Settings = field(default_factory=dict)
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None

    def has_experts(self, index: int) -> bool:
        return self.experts is not None and (self.have_experts is None or self.have_experts[index])

    def with_attention(self, **settings: Any) -> "Design":
        return replace(self, attention={**self.attention, **settings})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ropes:
    """The rotary positions of a model. rope: of layers without others. by_layer: None for one
    without any; empty where all have `rope`. attention: fields that they imply."""

    rope: RopeConfig
    by_layer: tuple[RopeConfig | None, ...] = ()
    attention: Settings = field(default_factory=dict)


def one_rope(fields: Fields, head_dim: int, windows: Windows) -> Ropes:
    return Ropes(rope=RopeSettings(fields).for_all_layers(head_dim))


def read_softcap(fields: Fields) -> float | None:
    """Returns Gemma's cap of logits; None without."""
    is_given = fields.get("final_logit_softcapping")
    return fields.number("final_logit_softcapping") if is_given else None


def ropes_by_kind(
    fields: Fields,
    head_dim: int,
    windows: Windows,
    *,
    local_theta: float | None = None,
    full_head_dim: int | None = None,
) -> Ropes:
    """Reads those of layers with a window, and of layers without. local_theta: of the former, where
    config.json does not say it; None for that of all. full_head_dim: of the latter."""
    settings = RopeSettings(fields)
    local_theta = fields.number("rope_theta") if local_theta is None else local_theta
    full = settings.by_kind(FULL, full_head_dim or head_dim, local_theta)
    local = settings.by_kind(SLIDING, head_dim, local_theta)
    return Ropes(rope=full, by_layer=tuple(full if each is None else local for each in windows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """architecture: its class in transformers. design: what is so in all its models. read: adds to
    it what config.json says; the keys that it and ropes and windows ask for are understood. ropes:
    gets the size of a head and all windows. windows: gets the number of layers. defaults: of keys
    that config.json may lack, where they are not Llama's. head_dim_key: the key of the size of a
    head, or of what rotary positions rotate of it. computes: keys of `rope_parameters` that it
    understands and others do not. without_effect: keys that change the answer in other families
    alone. has_fused_names: whether q, k, v, and gate, up, are one tensor each. exceeds_float16:
    whether activations of its models are larger than what float16 holds.
    """

    architecture: str
    design: Design = field(default_factory=Design)
    read: Callable[[Fields, Design], Design] = lambda fields, design: design
    ropes: Callable[[Fields, int, Windows], Ropes] = one_rope
    windows: Callable[[Fields, int], Windows] = no_window
    activation: str = "silu"
    defaults: Mapping[str, object] = field(default_factory=dict)
    head_dim_key: str = "head_dim"
    computes: frozenset[str] = frozenset()
    without_effect: frozenset[str] = frozenset()
    has_fused_names: bool = False
    exceeds_float16: bool = False


def check_heads(
    fields: Fields,
    num_heads: int,
    heads: KVHeads,
    *,
    kv_heads: str = "num_key_value_heads",
    head_dim: str = "head_dim is",
) -> None:
    """Raises InvalidModel. kv_heads, head_dim: what its message says before these numbers."""
    if num_heads % heads.num_kv_heads:
        raise InvalidModel(
            f"{fields.path}: num_attention_heads ({num_heads}) must be a multiple of {kv_heads} "
            f"({heads.num_kv_heads})"
        )
    if heads.head_dim % 2:
        raise InvalidModel(
            f"{fields.path}: {head_dim} {heads.head_dim}; it must be even, because rotary "
            "positions rotate pairs of dimensions"
        )


class Outline:
    """Holds the settings of config.json that layers of every family have, and their design.
    sizes: of the embedding and the head."""

    def __init__(self, fields: Fields, family: Family) -> None:
        """Raises InvalidModel."""
        self.fields, self._family = fields, family
        self._num_layers = fields.count("num_hidden_layers", most=_MAX_LAYERS)
        self._num_heads = heads = fields.count("num_attention_heads", most=MAX_HEADS)
        self._num_kv_heads = fields.count("num_key_value_heads", default=heads, most=MAX_HEADS)
        self._hidden_size = hidden = fields.count("hidden_size", most=MAX_WIDTH)
        key = family.head_dim_key
        self.head_dim = fields.count(key, default=hidden // heads, most=MAX_HEAD_DIM)
        vocab_size = fields.count("vocab_size", most=_MAX_VOCABULARY)
        self.sizes: dict[str, Any] = {"hidden_size": hidden, "vocab_size": vocab_size}
        check_neutral(fields, family.computes)
        kv_heads = KVHeads(self._num_kv_heads, self.head_dim)
        check_heads(fields, heads, kv_heads, head_dim=f"{key} is")
        self.design = family.read(fields, family.design)

    def layers(self) -> tuple[tuple[Layer, ...], RopeConfig]:
        """The layers, and the rotary positions that the longest sequence follows from."""
        design, family, num_layers = self.design, self._family, self._num_layers
        windows = family.windows(self.fields, num_layers)
        ropes = family.ropes(self.fields, self.head_dim, windows)
        layer_ropes = ropes.by_layer or (ropes.rope,) * num_layers
        mixers = design.mixers or (None,) * num_layers
        attention = self._attention(ropes.attention)
        plain = self._plain_layer(attention)
        kinds: dict[Layer, Layer] = {}  # equal layers are one object
        layers = []
        for index in range(num_layers):
            own = replace(attention, window=windows[index], rope=layer_ropes[index])
            layer = replace(plain, mixer=mixers[index] or own)
            if design.has_experts(index):
                mlp = plain.mlp if design.experts and design.experts.is_beside_mlp else None
                layer = replace(layer, experts=design.experts, mlp=mlp)
            layer = layer if design.by_layer is None else design.by_layer(index, layer)
            layers.append(kinds.setdefault(layer, layer))
        return tuple(layers), ropes.rope

    def _attention(self, implied: Settings) -> Attention:
        """Attention without a window and rotary positions. implied: fields by the latter."""
        design = self.design
        is_fused = {"is_fused": self._family.has_fused_names}
        settings = {
            **is_fused,
            **implied,
            **self._flags(design.attention_flags),
            **design.attention,
        }
        if is_number(settings.get("scale"), self.head_dim**-0.5):
            del settings["scale"]
        return Attention(
            hidden_size=self._hidden_size,
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            head_dim=self.head_dim,
            window=None,
            rope=None,
            **settings,
        )

    def _plain_layer(self, attention: Attention) -> Layer:
        """A layer without experts. It has no MLP where all have these alone, and config.json gives
        no size of it."""
        own, mlp, fields, design = None, None, self.fields, self.design
        if (inputs := design.per_layer_inputs) is not None:
            own = PerLayerInput(hidden_size=self._hidden_size, size=inputs.size)
        flags = self._flags(design.mlp_flags)
        are_alone = design.experts is not None and not design.experts.is_beside_mlp
        have_all = are_alone and all(map(design.has_experts, range(self._num_layers)))
        if not have_all or fields.get("intermediate_size") is not None:
            mlp = MLP(
                hidden_size=self._hidden_size,
                size=fields.count("intermediate_size", most=MAX_WIDTH),
                activation=ACTIVATIONS[self._family.activation],
                is_fused=self._family.has_fused_names,
                **flags,
                **design.mlp,
            )
        norms = Norms(hidden_size=self._hidden_size, **design.norms)
        return Layer(norms=norms, mixer=attention, mlp=mlp, per_layer_input=own)

    def _flags(self, keys: Mapping[str, str]) -> dict[str, bool]:
        return {name: self.fields.flag(key) for name, key in keys.items()}
