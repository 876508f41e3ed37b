"""A gated delta net whose tensors are given, rather than read."""

import copy

from torch import Tensor

from penstock.engine.models.parts.delta_net.config import DeltaNet
from penstock.engine.models.parts.delta_net.layer import DeltaNetLayer


def delta_net_layer(
    config: DeltaNet, *, taps: Tensor, decay: Tensor, bias: Tensor, norm: Tensor
) -> DeltaNetLayer:
    """Returns one without linear layers, which a recurrence does not read."""
    layer = DeltaNetLayer.__new__(DeltaNetLayer)
    layer.config, layer.eps = config, 1e-6
    layer.taps, layer.decay, layer.bias, layer.norm = taps, decay, bias, norm
    return layer


def exact(layer: DeltaNetLayer) -> DeltaNetLayer:
    """Returns the same in float64, on a processor."""
    wide = copy.copy(layer)
    for name in ("taps", "decay", "bias", "norm"):
        setattr(wide, name, getattr(layer, name).double().cpu())
    return wide
