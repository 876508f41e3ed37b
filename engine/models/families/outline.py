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
from penstock.engine.models.parts.delta_net.config import DeltaNet
from penstock.engine.models.parts.experts.config import MAX_WIDTH, Experts
from penstock.engine.models.parts.layer import Layer
from penstock.engine.models.parts.mlp.config import MLP, Activation
from penstock.engine.models.parts.norm.config import NormKind, Norms, Scalar
from penstock.engine.models.parts.per_layer_inputs.config import PerLayerInput, PerLayerInputs

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

    attention, mlp, norms: fields of these parts, the same in all layers. experts, delta_net: what
    layers have in place of an MLP or of attention, or beside it; which ones, are have_experts and
    have_delta_net, None for all. per_layer_inputs: None without. by_layer: gives a layer as it is,
    from its number and what it would be. norm: without its eps, where config.json has that.
    """

    attention: Settings = field(default_factory=dict)
    mlp: Settings = field(default_factory=dict)
    norms: Settings = field(default_factory=dict)
    norm: NormKind = _NORM
    experts: Experts | None = None
    have_experts: tuple[bool, ...] | None = None
    delta_net: DeltaNet | None = None
    have_delta_net: tuple[bool, ...] | None = None
    per_layer_inputs: PerLayerInputs | None = None
    has_scalars: bool = False
    by_layer: Callable[[int, Layer], Layer] | None = None
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None

    def with_attention(self, **settings: Any) -> "Design":
        return replace(self, attention={**self.attention, **settings})


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What the rotation of a layer's heads depends on besides its settings."""

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
    """What config.json says of the layers of every family."""

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
        attention = {**ropes.attention, **design.attention}
        if is_number(attention.get("scale"), self.head_dim**-0.5):
            del attention["scale"]
        mlp, own = self._mlp(design, family), None
        if (inputs := design.per_layer_inputs) is not None:
            own = PerLayerInput(hidden_size=self.hidden_size, size=inputs.size)
        kinds: dict[object, Layer] = {}  # equal layers are one object

        def layer(index: int) -> Layer:
            window, rope = windows[index], layer_ropes[index]
            is_recurrent = _has(design.delta_net, design.have_delta_net, index)
            has_experts = _has(design.experts, design.have_experts, index)
            experts = design.experts if has_experts else None
            mixer: Attention | DeltaNet | None = design.delta_net if is_recurrent else None
            found = Layer(
                norms=Norms(hidden_size=self.hidden_size, **design.norms),
                mixer=mixer
                or Attention(
                    hidden_size=self.hidden_size,
                    num_heads=self.num_heads,
                    num_kv_heads=self.num_kv_heads,
                    head_dim=self.head_dim,
                    window=window,
                    rope=rope,
                    is_fused=family.has_fused_names,
                    **attention,
                ),
                mlp=mlp if experts is None or experts.is_beside_mlp else None,
                experts=experts,
                per_layer_input=own,
                scalar=Scalar() if design.has_scalars else None,
            )
            found = found if design.by_layer is None else design.by_layer(index, found)
            return kinds.setdefault(found, found)

        return tuple(map(layer, range(self.num_layers))), ropes.rope

    def _mlp(self, design: Design, family: Family) -> MLP | None:
        """None where no layer has one, and config.json gives no size of it."""
        experts, fields = design.experts, self.fields
        are_all = experts is not None and (design.have_experts is None or all(design.have_experts))
        if are_all and fields.get("intermediate_size") is None:
            return None
        return MLP(
            hidden_size=self.hidden_size,
            size=fields.count("intermediate_size", most=MAX_WIDTH),
            activation=Activation(is_gelu=family.activation == "gelu_tanh"),
            is_fused=family.has_fused_names,
            **design.mlp,
        )


def _has(part: object, have: tuple[bool, ...] | None, index: int) -> bool:
    return part is not None and (have is None or have[index])
