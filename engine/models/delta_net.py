"""`DeltaNetConfig`: the layers with a gated delta net in place of attention, as config.json
describes them. Imports no tensors."""

from dataclasses import dataclass

from penstock.engine.memory.state_shape import StateShape
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.json_file import Fields
from penstock.engine.models.windows import FULL

LINEAR = "linear_attention"
# Far more than any model has.
_MAX_HEADS, _MAX_DIM, _MAX_TAPS = 2**12, 2**12, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    """layers: for each of the model's layers, whether it has one; the others have attention.

    Each key head serves num_value_heads / num_key_heads value heads, one after the other. num_taps:
    of the causal convolution over queries, keys and values.
    """

    layers: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int

    @property
    def num_layers(self) -> int:
        """Those with one."""
        return sum(self.layers)

    @property
    def num_keys(self) -> int:
        """Of all heads."""
        return self.num_key_heads * self.key_dim

    @property
    def num_values(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.num_keys + self.num_values

    @property
    def state_shape(self) -> StateShape:
        return StateShape(
            num_layers=self.num_layers,
            num_heads=self.num_value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            num_channels=self.num_channels,
            num_inputs=self.num_taps - 1,
        )

    def linear_shapes(self, hidden_size: int) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of a layer's matrices by name."""
        return {
            "linear_attn.in_proj_qkv": (self.num_channels, hidden_size),
            "linear_attn.in_proj_z": (self.num_values, hidden_size),
            "linear_attn.in_proj_b": (self.num_value_heads, hidden_size),
            "linear_attn.in_proj_a": (self.num_value_heads, hidden_size),
            "linear_attn.out_proj": (hidden_size, self.num_values),
        }

    @property
    def num_small_weights(self) -> int:
        """Elements of a layer that are in none of those: taps, decay, bias and norm."""
        return self.num_channels * self.num_taps + 2 * self.num_value_heads + self.value_dim

    @property
    def num_products_per_token(self) -> int:
        """Of a layer's recurrence: what the state remembers of the key, what the token adds, and
        what the query reads."""
        return 3 * self.num_values * self.key_dim


def read_delta_net(fields: Fields) -> DeltaNetConfig | None:
    """None where every layer has attention. Raises InvalidModel."""
    config = DeltaNetConfig(
        layers=tuple(kind == LINEAR for kind in _layer_types(fields)),
        num_key_heads=fields.count("linear_num_key_heads", most=_MAX_HEADS),
        num_value_heads=fields.count("linear_num_value_heads", most=_MAX_HEADS),
        key_dim=fields.count("linear_key_head_dim", most=_MAX_DIM),
        value_dim=fields.count("linear_value_head_dim", most=_MAX_DIM),
        num_taps=fields.count("linear_conv_kernel_dim", least=2, most=_MAX_TAPS),
    )
    if config.num_value_heads % config.num_key_heads:
        raise InvalidModel(
            f"{fields.path}: linear_num_value_heads ({config.num_value_heads}) must be a multiple "
            f"of linear_num_key_heads ({config.num_key_heads})"
        )
    return config if config.num_layers else None


def _layer_types(fields: Fields) -> list[str]:
    num_layers = fields.count("num_hidden_layers")
    interval = fields.count("full_attention_interval", default=4)
    kinds = fields.names("layer_types") or [
        FULL if (index + 1) % interval == 0 else LINEAR for index in range(num_layers)
    ]
    if len(kinds) != num_layers or not {FULL} <= {*kinds} <= {FULL, LINEAR}:
        raise InvalidModel(
            f"{fields.path}: layer_types must be {FULL!r} or {LINEAR!r} for each of {num_layers} "
            f"layers, and at least one of them {FULL!r}"
        )
    return kinds
