"""The output layer in torch."""

import torch
from torch import Tensor

from penstock.engine.models.parts.head.config import Head


def scaled_logits(config: Head, logits: Tensor) -> Tensor:
    """Logits of what the output layer gives: float32."""
    logits = logits.float()
    if config.multiplier != 1:
        logits = logits * config.multiplier
    if config.softcap is not None:
        logits = torch.tanh(logits / config.softcap) * config.softcap
    return logits
