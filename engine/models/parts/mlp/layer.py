"""The gated MLP in torch."""

from torch import Tensor

from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.parts.activation_layer import gated
from penstock.engine.models.parts.adapter import adapted
from penstock.engine.models.parts.mlp.config import MLP
from penstock.engine.models.parts.reader import PartReader
from penstock.engine.models.parts.tensors import Stack
from penstock.engine.step.model_input import ModelInput


class MLPLayer:
    """One layer's weights. gate_up is stacked, so that it is one matrix product."""

    def __init__(self, config: MLP, reader: PartReader) -> None:
        self.config = config
        self.gate_up: Linear = reader.linear(config.linears["gate_up"])
        self.down: Linear = reader.linear(config.linears["down"])

    @property
    def num_bytes(self) -> int:
        return self.gate_up.num_bytes + self.down.num_bytes

    def __call__(self, x: Tensor, index: int, step: ModelInput) -> Tensor:
        """What it makes of x, (T, hidden_size), on this rank. index: which layer it is."""
        gate_up = adapted(self.gate_up, x, step.adapters, index, Stack.GATE_UP)
        active = gated(self.config.activation, *gate_up.chunk(2, dim=-1))
        return adapted(self.down, active, step.adapters, index, Stack.DOWN)
