"""Attention over the paged KV pool: the protocol that every backend keeps."""

from typing import Protocol

from torch import Tensor

from penstock.engine.model_input import ModelInput


class Attention(Protocol):
    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, step: ModelInput, window: int | None
    ) -> Tensor:
        """Causal attention of each token to its own sequence: (T, num_heads, head_dim).

        query: (T, num_heads, head_dim). keys, values: one layer of the pool, (num_blocks,
        block_size, num_kv_heads, head_dim), this step's tokens already written. window: how many
        positions a token sees, itself included, or None for all.
        """
        ...
