"""`AttentionShape`: the sizes of a model's attention. Imports no tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The same for every step, and for all layers whose heads are alike. latent_dim: where it is
    not 0, there is one KV head, and its values are the first so many numbers of its keys."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    latent_dim: int = 0

    @property
    def value_dim(self) -> int:
        return self.latent_dim or self.head_dim

    @property
    def is_flash(self) -> bool:
        """Whether FlashAttention has kernels for such heads."""
        return self.head_dim % 8 == 0 and self.head_dim <= 256
