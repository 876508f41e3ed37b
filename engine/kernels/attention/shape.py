"""`AttentionShape`: the sizes of a model's attention. Imports no tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The same for every step, and for all layers whose heads are alike."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_flash(self) -> bool:
        """Whether FlashAttention has kernels for such heads."""
        return self.head_dim % 8 == 0 and self.head_dim <= 256
