"""A layer's gated delta net on the GPU: two kernels for decodes, and five for prefill chunks."""

from torch import Tensor

from penstock.engine.models.layers.fused_linear import FUSED_LINEARS
from penstock.engine.models.parts.delta_net.kernels.chunks import recur_chunks
from penstock.engine.models.parts.delta_net.kernels.convolution import convolve
from penstock.engine.models.parts.delta_net.kernels.decode import recur_decodes
from penstock.engine.models.parts.delta_net.kernels.shape import Gates
from penstock.engine.models.parts.delta_net.layer import DeltaNetLayer
from penstock.engine.step.device_step import DeviceStep


class FusedDeltaNet:
    """It waits for nothing, so a CUDA graph may hold it. Nothing is written for tokens that only
    pad a graph."""

    def __init__(self, layer: DeltaNetLayer) -> None:
        """Raises UnsupportedWeightFormat."""
        self._weights = layer.weights
        self._shape = layer.config.state_shape(num_layers=1)
        self.qkv = FUSED_LINEARS.of(layer.qkv)
        self.gates = FUSED_LINEARS.of(layer.gates)
        self.output = FUSED_LINEARS.of(layer.output)

    def __call__(
        self,
        projected: Tensor,
        gates: Tensor,
        step: DeviceStep,
        matrices: Tensor,
        inputs: Tensor,
        out: Tensor,
    ) -> None:
        """Writes out (T, values): what the layer's output projection reads.

        projected, gates: as for `Recurrence`, in the model's type. step: as the layer's group sees
        it. matrices, inputs: see `StatePool`; those of the step's sequences are replaced.
        """
        net, shape = self._weights, self._shape
        mixed = convolve(shape, projected, net.taps, step, inputs)
        both = Gates(gates, net.decay, net.bias)
        for recur in (recur_decodes, recur_chunks):
            recur(shape, projected, mixed, both, net.norm, net.eps, step, matrices, out)
