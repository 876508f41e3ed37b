"""`OnDevice`: a model on a device, for an executor that makes steps and samples on the host."""

import torch
from torch import Tensor

from penstock.engine.memory.pool.kv_pool import LayerPools
from penstock.engine.models.decoder.model import LlamaModel
from penstock.engine.step.model_input import ModelInput


class OnDevice:
    """See `Model`."""

    def __init__(self, model: LlamaModel, device: torch.device) -> None:
        self._model, self._device = model, device

    def __call__(self, step: ModelInput, pool: LayerPools) -> Tensor:
        return self.logits(self.states(step, pool, step.sample_rows))

    def states(self, step: ModelInput, pool: LayerPools, rows: Tensor) -> Tensor:
        device = self._device
        return self._model.states(step.to(device), pool, rows.to(device)).cpu()

    def logits(self, states: Tensor) -> Tensor:
        return self._model.logits(states.to(self._device)).float().cpu()
