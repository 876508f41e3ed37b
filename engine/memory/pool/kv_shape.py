"""`KVShape`: what the KV pool needs to know of a model. Imports no tensors."""

from dataclasses import dataclass
from typing import NamedTuple

# A token and head has a scale, where an element has one byte.
_SCALE_BYTES = 4


class KVHeads(NamedTuple):
    """One layer has them. latent_dim: where it is not 0, a head's values are the first so many
    numbers of its keys, and are not stored."""

    num_kv_heads: int
    head_dim: int
    latent_dim: int = 0

    @property
    def value_dim(self) -> int:
        return self.latent_dim or self.head_dim

    @property
    def num_stored(self) -> int:
        """Counts keys, and values where these are stored."""
        return 1 if self.latent_dim else 2

    def bytes_per_token(self, itemsize: int) -> int:
        """The keys and values of one token take these. itemsize: bytes of one element; those of one
        byte are codes, and each head has a scale besides."""
        scale_bytes = _SCALE_BYTES if itemsize == 1 else 0
        return self.num_stored * self.num_kv_heads * (self.head_dim * itemsize + scale_bytes)


@dataclass(frozen=True, slots=True)
class KVShape:
    """The keys and values of one token.

    heads: of each layer of a model; a layer with a recurrence has none, num_kv_heads being 0.
    sources: of each, the layer whose keys and values it reads, where some have none of their own.
    """

    heads: tuple[KVHeads, ...]
    sources: tuple[int, ...] = ()

    @classmethod
    def of(cls, *, num_layers: int, num_kv_heads: int, head_dim: int) -> "KVShape":
        """For layers that are all alike."""
        return cls((KVHeads(num_kv_heads, head_dim),) * num_layers)

    @property
    def num_layers(self) -> int:
        return len(self.heads)

    def source_of(self, layer: int) -> int:
        """The layer whose keys and values it reads: mostly itself."""
        return self.sources[layer] if self.sources else layer

    @property
    def own_layers(self) -> list[int]:
        """Those that read no other's keys and values."""
        return [layer for layer in range(self.num_layers) if self.source_of(layer) == layer]

    def bytes_per_token(self, itemsize: int) -> int:
        """In all layers, as they are held in memory. itemsize: see `KVHeads`."""
        return sum(self.heads[layer].bytes_per_token(itemsize) for layer in self.own_layers)
