"""Activations in torch."""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.models.parts.activation import Activation


def gated(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """What a gate makes of the product beside it."""
    if activation.clamp is not None:
        return clamped_swiglu(gate, up, *activation.clamp)
    if activation.is_gelu:
        return functional.gelu(gate, approximate="tanh") * up
    return functional.silu(gate) * up


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """gpt-oss's activation of both."""
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)
