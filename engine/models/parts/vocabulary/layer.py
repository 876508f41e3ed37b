"""The input embedding and the output layer in torch."""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.models.parts.vocabulary.config import Embedding, Head


def embed(config: Embedding, table: Tensor, token_ids: Tensor) -> Tensor:
    """The states before the first layer: (T, hidden_size)."""
    states = functional.embedding(token_ids, table)
    return states if config.multiplier == 1 else states * multiplier(config, table.dtype)


def multiplier(config: Embedding, dtype: torch.dtype) -> float:
    """Rounded to the type of the states, as Gemma was trained."""
    return float(torch.tensor(config.multiplier, dtype=dtype))


def scaled_logits(config: Head, logits: Tensor) -> Tensor:
    """Logits of what the output layer gives: float32."""
    logits = logits.float()
    if config.multiplier != 1:
        logits = logits * config.multiplier
    if config.softcap is not None:
        logits = torch.tanh(logits / config.softcap) * config.softcap
    return logits
