"""The gated MLP in torch."""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.parts.adapter import adapted
from penstock.engine.models.parts.mlp.config import MLP, Activation
from penstock.engine.models.parts.reader import PartLayer
from penstock.engine.models.parts.tensors import Stack
from penstock.engine.step.model_input import ModelInput


class MLPLayer(PartLayer[MLP]):
    """gate_up is stacked, so that it is one matrix product."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor, index: int, step: ModelInput) -> Tensor:
        """Returns its output for x, (T, hidden_size), on this rank. index: which layer it is."""
        gate_up = adapted(self.gate_up, x, step.adapters, index, Stack.GATE_UP)
        activation = self.config.activation
        if self.config.has_gate:
            gate, up = gate_up.chunk(2, dim=-1)
            if self.config.has_up_first:
                gate, up = up, gate
            active = gated(activation, gate, up)
        else:
            active = activated(activation, gate_up)
        return adapted(self.down, active, step.adapters, index, Stack.DOWN)


def gated(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """Applies a gate to the product beside it."""
    if activation.clamp is not None:
        return clamped_swiglu(gate, up, *activation.clamp)
    return activated(activation, gate) * up


def activated(activation: Activation, x: Tensor) -> Tensor:
    if activation.is_gelu:
        return functional.gelu(x, approximate="none" if activation.is_exact else "tanh")
    return functional.silu(x)


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """gpt-oss's activation of both."""
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)
