"""`KVShape`: what the KV pool needs to know of a model. Imports no tensors."""

from dataclasses import dataclass

# Of the scale of a token and head, where an element has one byte.
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """The keys and values of one token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_token(self, itemsize: int) -> int:
        """In all layers. itemsize: bytes of one element; those of one byte are codes, and each head
        has a scale besides."""
        return self.num_layers * self.layer_bytes_per_token(itemsize)

    def layer_bytes_per_token(self, itemsize: int) -> int:
        scale_bytes = _SCALE_BYTES if itemsize == 1 else 0
        return 2 * self.num_kv_heads * (self.head_dim * itemsize + scale_bytes)
