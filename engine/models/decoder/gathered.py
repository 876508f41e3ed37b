"""The logits of a model of which each rank computes some columns."""

import torch
from torch import Tensor

from penstock.engine.memory.pool.kv_pool import LayerPools
from penstock.engine.models.decoder.model import Model
from penstock.engine.ranks.group import Group
from penstock.engine.step.model_input import ModelInput


class GatheredModel:
    """See `Model`. Rank 0 has the logits; on others they are zeros, which nobody should read."""

    def __init__(self, model: Model, group: Group, vocab_size: int) -> None:
        """vocab_size: of the whole model; the ranks' together may be a few more."""
        self._model = model
        self._group = group
        self._vocab_size = vocab_size

    def __call__(self, step: ModelInput, pool: LayerPools) -> Tensor:
        return self._gathered(self._model(step, pool))

    def states(self, step: ModelInput, pool: LayerPools, rows: Tensor) -> Tensor:
        return self._model.states(step, pool, rows)

    def logits(self, states: Tensor) -> Tensor:
        return self._gathered(self._model.logits(states))

    def _gathered(self, part: Tensor) -> Tensor:
        if not len(part):
            return part.new_empty(0, self._vocab_size)
        parts = self._group.gather(part)
        if parts is None:
            return part.new_zeros(len(part), self._vocab_size)
        return joined(parts, part.new_empty(len(part), self._vocab_size))


def joined(parts: Tensor, logits: Tensor) -> Tensor:
    """parts: (ranks, S, columns), of which the last may be padding. Writes logits, (S, vocab_size),
    and returns them."""
    columns = torch.split(logits, parts.shape[2], dim=1)
    for into, each in zip(columns, parts, strict=False):  # the last ranks may have none
        into.copy_(each[:, : into.shape[1]])
    return logits
