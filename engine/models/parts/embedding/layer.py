"""The input embedding in torch."""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.models.parts.embedding.config import Embedding


def embed(config: Embedding, table: Tensor, token_ids: Tensor) -> Tensor:
    """The states before the first layer: (T, hidden_size)."""
    states = functional.embedding(token_ids, table)
    return states if config.multiplier == 1 else states * multiplier(config, table.dtype)


def multiplier(config: Embedding, dtype: torch.dtype) -> float:
    """Rounded to the type of the states, as Gemma was trained."""
    return float(torch.tensor(config.multiplier, dtype=dtype))
