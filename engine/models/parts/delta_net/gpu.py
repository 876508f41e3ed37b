"""A layer's gated delta net on the GPU: two kernels for decodes, and five for prefill chunks."""

from torch import Tensor

from penstock.engine.memory.pool.kv_pool import LayerPools
from penstock.engine.models.layers.fused_linear import fused_linear
from penstock.engine.models.parts.delta_net.kernels.chunks import recur_chunks
from penstock.engine.models.parts.delta_net.kernels.convolution import convolve
from penstock.engine.models.parts.delta_net.kernels.decode import recur_decodes
from penstock.engine.models.parts.delta_net.kernels.shape import Gates
from penstock.engine.models.parts.delta_net.layer import DeltaNetLayer
from penstock.engine.step.device_step import DeviceStep


class FusedDeltaNet:
    """See `FusedMixer`. Nothing is written for tokens that only pad a graph."""

    def __init__(self, layer: DeltaNetLayer, pool: LayerPools, index: int, *_: object) -> None:
        """Raises UnsupportedWeightFormat."""
        self._layer, self._states = layer, pool.states(index)
        self._shape = layer.config.state_shape(num_layers=1)
        self.projections = [fused_linear(layer.qkv), fused_linear(layer.gates)]
        self.output = fused_linear(layer.output)
        self.out_shape: tuple[int, ...] = (layer.config.num_values,)

    def __call__(self, projected: list[Tensor], step: DeviceStep, out: Tensor) -> Tensor:
        """See `FusedMixer`; the states of the step's sequences in the pool are replaced."""
        net, shape, (qkv, gates) = self._layer, self._shape, projected
        matrices, inputs = self._states
        mixed = convolve(shape, qkv, net.taps, step, inputs)
        both = Gates(gates, net.decay, net.bias)
        for recur in (recur_decodes, recur_chunks):
            recur(shape, qkv, mixed, both, net.norm, net.eps, step, matrices, out)
        return out
