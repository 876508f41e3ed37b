"""`KVShape`: what the KV pool needs to know of a model. Imports no tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """The keys and values of one token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_token(self, itemsize: int) -> int:
        """In all layers. itemsize: bytes of one element."""
        return self.num_layers * self.layer_bytes_per_token(itemsize)

    def layer_bytes_per_token(self, itemsize: int) -> int:
        return 2 * self.num_kv_heads * self.head_dim * itemsize
