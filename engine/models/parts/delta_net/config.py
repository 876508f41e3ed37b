"""`DeltaNet`: what config.json says of a layer with a gated delta net in place of attention.
Imports no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.engine.files.json_file import Fields
from penstock.engine.memory.pool.state_shape import StateShape
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.parts.attention.windows import FULL
from penstock.engine.models.parts.tensors import (
    Axis,
    LinearSpec,
    MatrixSpec,
    Part,
    Stack,
    VectorSpec,
    matrix,
)

LINEAR = "linear_attention"
# Far more than any model has.
_MAX_HEADS, _MAX_DIM, _MAX_TAPS = 2**12, 2**12, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet(Part):
    """Each key head serves num_value_heads / num_key_heads value heads, one after the other.
    num_taps: of the causal convolution over queries, keys and values.
    """

    LLAMA = (("num_taps", 0, "delta_net"),)

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int

    @property
    def num_keys(self) -> int:
        """The keys of all heads."""
        return self.num_key_heads * self.key_dim

    @property
    def num_values(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """The inputs of the convolution: queries, keys and values."""
        return 2 * self.num_keys + self.num_values

    def state_shape(self, num_layers: int) -> StateShape:
        return StateShape(
            num_layers=num_layers,
            num_heads=self.num_value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            num_channels=self.num_channels,
            num_inputs=self.num_taps - 1,
        )

    @property
    def linears(self) -> Mapping[str, LinearSpec]:
        """gates: beta of each value head, then what its decay is made of. qkv: the convolution's
        inputs, then output gates. output: back to the states."""
        hidden, heads, keys, values = Axis(self.hidden_size), *self._axes

        def read(name: str, gguf: str, *rows: Axis) -> MatrixSpec:
            return MatrixSpec((f"linear_attn.in_proj_{name}",), rows, hidden, (gguf,))

        gates = read("b", "ssm_beta", heads), read("a", "ssm_alpha", heads)
        qkv = read("qkv", "attn_qkv", keys, keys, values), read("z", "attn_gate", values)
        output = matrix("linear_attn.out_proj", hidden, values, "ssm_out")
        return {
            "gates": LinearSpec(gates, adapters=Stack.GATES),
            "qkv": LinearSpec(qkv, adapters=Stack.QKV),
            "output": LinearSpec((output,), adapters=Stack.OUTPUT),
        }

    @property
    def vectors(self) -> Mapping[str, VectorSpec]:
        heads, keys, values = self._axes

        def vector(name: str, gguf: str, *rows: Axis, others: tuple[int, ...] = ()) -> VectorSpec:
            return VectorSpec(f"linear_attn.{name}", rows, others, gguf)

        taps = (1, self.num_taps)
        return {
            "taps": vector("conv1d.weight", "ssm_conv1d.weight", keys, keys, values, others=taps),
            "decay": vector("A_log", "ssm_a", heads),
            "bias": vector("dt_bias", "ssm_dt.bias", heads),
            "norm": vector("norm.weight", "ssm_norm.weight", Axis(self.value_dim)),
        }

    @property
    def _axes(self) -> tuple[Axis, Axis, Axis]:
        """Value heads, the keys of all heads, the values of all heads."""
        key = "linear_num_value_heads"
        return (
            Axis(self.num_value_heads, key=key),
            Axis(self.num_key_heads, self.key_dim, "linear_num_key_heads", is_shared=True),
            Axis(self.num_value_heads, self.value_dim, key),
        )

    def divided(self, num_ranks: int) -> "DeltaNet":
        values, keys, _ = self._axes
        return replace(
            self,
            num_key_heads=keys.num_own(num_ranks),
            num_value_heads=values.num_own(num_ranks),
        )

    @property
    def num_state_products(self) -> int:
        """See `Part`: what the state remembers of the key, what the token adds, and what the query
        reads."""
        return 3 * self.num_values * self.key_dim


def read_delta_nets(fields: Fields) -> tuple[DeltaNet | None, ...]:
    """Returns the delta net of each layer, None for one of attention. Raises InvalidModel."""
    config = DeltaNet(
        hidden_size=fields.count("hidden_size"),
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
    return tuple(config if kind == LINEAR else None for kind in _layer_types(fields))


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
