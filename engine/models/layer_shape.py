"""`LayerShape`: the sizes of one layer's attention and MLP. Imports no tensors."""

from dataclasses import dataclass

from penstock.engine.memory.kv_shape import KVHeads


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """heads: num_kv_heads is 0 where the layer has a recurrence in place of attention. has_gates:
    whether queries come with gates of what attention gives. has_keys: whether it has keys and
    values of its own, rather than another layer's. has_values: whether it has a matrix for values;
    where it has one for keys alone, values are the same product before keys are normalised and
    rotated.
    """

    num_heads: int
    heads: KVHeads
    intermediate_size: int
    has_gates: bool = False
    has_keys: bool = True
    has_values: bool = True

    @property
    def query_size(self) -> int:
        return self.num_heads * self.heads.head_dim

    @property
    def qkv(self) -> dict[str, int]:
        """The rows of the matrices whose products attention begins with, by their names."""
        kv_size = self.heads.num_kv_heads * self.heads.head_dim
        rows = {"self_attn.q_proj": self.query_size * (1 + self.has_gates)}
        if self.has_keys:
            rows["self_attn.k_proj"] = kv_size
        if self.has_keys and self.has_values:
            rows["self_attn.v_proj"] = kv_size
        return rows

    @property
    def qkv_size(self) -> int:
        return sum(self.qkv.values())
