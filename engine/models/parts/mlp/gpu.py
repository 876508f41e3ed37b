"""The gated MLP on a GPU."""

from penstock.engine.models.layers.fused_linear import FUSED_LINEARS
from penstock.engine.models.parts.mlp.layer import MLPLayer


class FusedMLP:
    def __init__(self, layer: MLPLayer) -> None:
        """Raises UnsupportedWeightFormat."""
        self.size = layer.config.size
        self.is_gelu = layer.config.activation.is_gelu
        self.gate_up = FUSED_LINEARS.of(layer.gate_up)
        self.down = FUSED_LINEARS.of(layer.down)
