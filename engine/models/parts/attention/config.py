"""`Attention`: what config.json says of a layer's attention. Imports no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from penstock.engine.memory.pool.kv_shape import KVHeads
from penstock.engine.models.parts.attention.rope import RopeConfig
from penstock.engine.models.parts.tensors import (
    Axis,
    LinearSpec,
    MatrixSpec,
    Part,
    Stack,
    VectorSpec,
    matrix,
)


class HeadNorms(Enum):
    """Which norms queries and keys have: none, of each head, or of all heads together."""

    NONE = auto()
    EACH = auto()
    WHOLE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Part):
    """window: how many positions a token attends to, its own included, or None for all before it.
    rope: None without rotary positions. rotary_dim: how many dimensions of a head are rotated, None
    for all. query_scaling: see `RopeSettings`. scale: of scores, None for head_dim ** -0.5.
    has_gates: whether what it gives is multiplied by the sigmoid of a gate, which q_proj gives
    after each head's query. has_sinks: whether each head has one score more, which takes its share
    and has no value. has_keys: whether it has keys and values of its own, rather than those of the
    last layer before it with the same window. has_values: whether it has a matrix for values; where
    it has one for keys alone, values are the same product before keys are normalised and rotated.
    norms_values: without a weight. has_spans: whether a token of an image attends to all of it, to
    later ones too. is_fused: whether one tensor has queries, keys and values.
    kv_heads_key: what config.json calls num_kv_heads.
    """

    LLAMA = (
        ("rotary_dim", None, "rotary_dim"),
        ("query_scaling", None, "query_scaling"),
        ("scale", None, "attention_scale"),
        ("qkv_bias", False, "qkv_bias"),
        ("output_bias", False, "output_bias"),
        ("norms_each", False, "qk_norm"),
        ("norms_whole", False, "whole_qk_norm"),
        ("has_gates", False, "attention_gates"),
        ("has_sinks", False, "attention_sinks"),
        ("has_keys", True, "shared_kv_layers"),
        ("has_values", True, "keys_are_values"),
        ("norms_values", False, "value_norm"),
    )

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    rope: RopeConfig | None
    rotary_dim: int | None = None
    query_scaling: tuple[float, int] | None = None
    scale: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    head_norms: HeadNorms = HeadNorms.NONE
    has_gates: bool = False
    has_sinks: bool = False
    has_keys: bool = True
    has_values: bool = True
    norms_values: bool = False
    has_spans: bool = False
    is_two_sided: bool = False
    is_fused: bool = False
    kv_heads_key: str = "num_key_value_heads"

    @property
    def heads(self) -> KVHeads:
        return KVHeads(self.num_kv_heads, self.head_dim)

    @property
    def angles_dim(self) -> int:
        """See `RotatedHeads`."""
        return self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_kv_parts(self) -> int:
        """How many of keys and values the first product gives beside queries."""
        return self.has_keys * (1 + self.has_values)

    @property
    def qkv_sizes(self) -> list[int]:
        """The rows of queries, and of what else the first product gives, one after the other."""
        query = self.num_heads * self.head_dim * (1 + self.has_gates)
        return [query, *[self.kv_size] * self.num_kv_parts]

    @property
    def norms_each(self) -> bool:
        return self.head_norms is HeadNorms.EACH

    @property
    def norms_whole(self) -> bool:
        return self.head_norms is HeadNorms.WHOLE

    @property
    def linears(self) -> Mapping[str, LinearSpec]:
        """qkv: queries, keys and values. output: back to the states."""
        hidden, query = Axis(self.hidden_size), self._heads(1 + self.has_gates)
        rows = {"q": query, "k": self._kv_heads, "v": self._kv_heads}
        own = list(rows)[: 1 + self.num_kv_parts]
        matrices = tuple(
            matrix(f"self_attn.{name}_proj", rows[name], hidden, f"attn_{name}") for name in own
        )
        if self.is_fused:
            fused = tuple(rows[name] for name in own)
            matrices = (MatrixSpec(("self_attn.qkv_proj",), fused, hidden, ("attn_qkv",)),)
        output = matrix("self_attn.o_proj", hidden, self._heads(), "attn_output")
        return {
            "qkv": LinearSpec(matrices, self.qkv_bias, adapters=Stack.QKV),
            "output": LinearSpec((output,), self.output_bias, adapters=Stack.OUTPUT),
        }

    @property
    def vectors(self) -> Mapping[str, VectorSpec]:
        """query_norm, key_norm, sinks: those that it has."""
        found: dict[str, VectorSpec] = {}
        if self.head_norms is not HeadNorms.NONE:
            head = Axis(self.head_dim)
            query, key = (self._heads(), self._kv_heads) if self.norms_whole else (head, head)
            norms = {"query_norm": ("q", query), "key_norm": ("k", key)}
            for name, (short, rows) in list(norms.items())[: 1 + self.has_keys]:
                stored, gguf = f"self_attn.{short}_norm.weight", f"attn_{short}_norm.weight"
                found[name] = VectorSpec(stored, (rows,), gguf=gguf, is_norm=True)
        if self.has_sinks:
            found["sinks"] = VectorSpec(
                "self_attn.sinks", (self._heads(width=1),), gguf="attn_sinks.weight"
            )
        return found

    def _heads(self, times: int = 1, width: int | None = None) -> Axis:
        width = self.head_dim * times if width is None else width
        return Axis(self.num_heads, width, "num_attention_heads")

    @property
    def _kv_heads(self) -> Axis:
        return Axis(self.num_kv_heads, self.head_dim, self.kv_heads_key, is_shared=True)

    def divided(self, num_ranks: int) -> "Attention":
        heads, kv_heads = self._heads().num_own(num_ranks), self._kv_heads.num_own(num_ranks)
        return replace(self, num_heads=heads, num_kv_heads=kv_heads)
