"""From config.json to a list of layers: `Design` is in what a family's layers differ from Llama's,
`Outline` what config.json says of every family's. Imports no tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.engine.files.json_file import Fields, is_number
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.parts.attention.config import Attention
from penstock.engine.models.parts.attention.rope import RopeConfig, RopeSettings
from penstock.engine.models.parts.attention.windows import Windows, no_window
from penstock.engine.models.parts.experts.config import MAX_WIDTH, Experts
from penstock.engine.models.parts.layer import Layer
from penstock.engine.models.parts.mlp.config import MLP, Activation
from penstock.engine.models.parts.norm.config import Norms
from penstock.engine.models.parts.per_layer_inputs.config import PerLayerInput, PerLayerInputs
from penstock.engine.models.parts.tensors import NormKind, Part

# Far more than any model has: absurd sizes are refused before anything is allocated for them.
_MAX_LAYERS = 10_000
_MAX_HEADS = 2**16
_MAX_HEAD_DIM = 2**16
_MAX_VOCABULARY = 2**24

Settings = Mapping[str, Any]
_NORM = NormKind(eps=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """In what the layers of a family differ from Llama's, by config.json.

    attention, mlp, norms: fields of these parts, the same in all layers. experts: what layers have
    in place of an MLP, or beside it; which ones, is have_experts, None for all. mixers: for each
    layer what it has in place of attention, or None; empty where all have attention.
    per_layer_inputs: None without. by_layer: gives a layer as it is, from its number and what it
    would be. norm: without its eps, where config.json has that.
    """

    attention: Settings = field(default_factory=dict)
    mlp: Settings = field(default_factory=dict)
    norms: Settings = field(default_factory=dict)
    norm: NormKind = _NORM
    experts: Experts | None = None
    have_experts: tuple[bool, ...] | None = None
    mixers: tuple[Part | None, ...] = ()
    per_layer_inputs: PerLayerInputs | None = None
    by_layer: Callable[[int, Layer], Layer] | None = None
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None

    def has_experts(self, index: int) -> bool:
        return self.experts is not None and (self.have_experts is None or self.have_experts[index])

    def with_attention(self, **settings: Any) -> "Design":
        return replace(self, attention={**self.attention, **settings})


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The rotation of a layer's heads depends on this besides its settings."""

    dim: int
    windows: Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Ropes:
    """The rotary positions of a model. rope: of layers without others. by_layer: None for one
    without any; empty where all have `rope`. attention: fields that they imply."""

    rope: RopeConfig
    by_layer: tuple[RopeConfig | None, ...] = ()
    attention: Settings = field(default_factory=dict)


def one_rope(fields: Fields, head: Head) -> Ropes:
    return Ropes(rope=RopeSettings(fields).for_all_layers(head.dim))


def llama(fields: Fields) -> Design:
    """Llama's layers, with the biases that config.json names."""
    has_bias = fields.flag("attention_bias")
    return Design(
        attention={"qkv_bias": has_bias, "output_bias": has_bias},
        mlp={"has_bias": fields.flag("mlp_bias")},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """architecture: its class in transformers. design, ropes, windows: read config.json; the keys
    that they ask it for are understood. defaults: of keys that config.json may lack,
    where they are not Llama's. computes: keys of `rope_parameters` that it understands and others
    do not. without_effect: keys that change the answer in other families alone. has_fused_names:
    whether q, k, v, and gate, up, are one tensor each. exceeds_float16: whether activations of its
    models are larger than what float16 holds.
    """

    architecture: str
    design: Callable[[Fields], Design] = llama
    ropes: Callable[[Fields, Head], Ropes] = one_rope
    windows: Callable[[Fields, int], Windows] = no_window
    activation: str = "silu"
    defaults: Mapping[str, object] = field(default_factory=dict)
    computes: frozenset[str] = frozenset()
    without_effect: frozenset[str] = frozenset()
    has_fused_names: bool = False
    exceeds_float16: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Holds the settings of config.json that layers of every family have."""

    fields: Fields
    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def read(cls, fields: Fields, family: Family) -> "Outline":
        """Raises InvalidModel."""
        num_layers = fields.count("num_hidden_layers", most=_MAX_LAYERS)
        num_heads = fields.count("num_attention_heads", most=_MAX_HEADS)
        num_kv_heads = fields.count("num_key_value_heads", default=num_heads, most=_MAX_HEADS)
        hidden_size = fields.count("hidden_size", most=MAX_WIDTH)
        head_dim = fields.count("head_dim", default=hidden_size // num_heads, most=_MAX_HEAD_DIM)
        return cls(
            fields=fields,
            hidden_size=hidden_size,
            vocab_size=fields.count("vocab_size", most=_MAX_VOCABULARY),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )

    def check(self) -> None:
        """Raises InvalidModel."""
        path = self.fields.path
        if self.num_heads % self.num_kv_heads:
            raise InvalidModel(
                f"{path}: num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise InvalidModel(
                f"{path}: head_dim is {self.head_dim}; it must be even, because rotary positions "
                "rotate pairs of dimensions"
            )

    def layers(self, design: Design, family: Family) -> tuple[tuple[Layer, ...], RopeConfig]:
        """The layers, and the rotary positions that the longest sequence follows from."""
        windows = family.windows(self.fields, self.num_layers)
        ropes = family.ropes(self.fields, Head(dim=self.head_dim, windows=windows))
        layer_ropes = ropes.by_layer or (ropes.rope,) * self.num_layers
        mixers = design.mixers or (None,) * self.num_layers
        settings = {**ropes.attention, **design.attention}
        if is_number(settings.get("scale"), self.head_dim**-0.5):
            del settings["scale"]
        attention = Attention(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            window=None,
            rope=None,
            is_fused=family.has_fused_names,
            **settings,
        )
        plain = self._plain_layer(design, family, attention)
        kinds: dict[Layer, Layer] = {}  # equal layers are one object
        layers = []
        for index in range(self.num_layers):
            own = replace(attention, window=windows[index], rope=layer_ropes[index])
            layer = replace(plain, mixer=mixers[index] or own)
            if design.has_experts(index):
                mlp = plain.mlp if design.experts and design.experts.is_beside_mlp else None
                layer = replace(layer, experts=design.experts, mlp=mlp)
            layer = layer if design.by_layer is None else design.by_layer(index, layer)
            layers.append(kinds.setdefault(layer, layer))
        return tuple(layers), ropes.rope

    def _plain_layer(self, design: Design, family: Family, attention: Attention) -> Layer:
        """A layer without experts. It has no MLP where none has one, and config.json gives no size
        of it."""
        own, mlp, fields = None, None, self.fields
        if (inputs := design.per_layer_inputs) is not None:
            own = PerLayerInput(hidden_size=self.hidden_size, size=inputs.size)
        have_all = all(map(design.has_experts, range(self.num_layers)))
        if not have_all or fields.get("intermediate_size") is not None:
            mlp = MLP(
                hidden_size=self.hidden_size,
                size=fields.count("intermediate_size", most=MAX_WIDTH),
                activation=Activation(is_gelu=family.activation == "gelu_tanh"),
                is_fused=family.has_fused_names,
                **design.mlp,
            )
        norms = Norms(hidden_size=self.hidden_size, **design.norms)
        return Layer(norms=norms, mixer=attention, mlp=mlp, per_layer_input=own)
