"""A layer's experts on the GPU: the router, four kernels for one token, and five for more."""

import torch
from torch import Tensor

from penstock.engine.kernels.activation import add_gated, silu_mul
from penstock.engine.kernels.linear import MAX_ROWS
from penstock.engine.kernels.norm import add_rms_norm, rms_norm
from penstock.engine.models.errors import UnsupportedWeightFormat
from penstock.engine.models.layers.fused_linear import fused_linear, product
from penstock.engine.models.layers.linear import Linear, PlainLinear
from penstock.engine.models.parts.experts.kernels.products import down, gate_up
from penstock.engine.models.parts.experts.kernels.routing import FEW_ROWS, Tiles, route, tiles_of
from penstock.engine.models.parts.experts.layer import ExpertsLayer

EXPERTS_PATH = "the GPU's step for experts"


class FusedExperts:
    """An `ExpertsLayer` on the GPU. It waits for nothing, so a CUDA graph may hold it. Tokens that
    only pad a graph are routed as others are."""

    def __init__(self, layer: ExpertsLayer) -> None:
        """Raises UnsupportedWeightFormat."""
        self._layer = layer
        self._router = fused_linear(layer.router)
        self._gate_up, self._down = plain(layer.gate_up), plain(layer.down)
        # One token's rows are tiles of their own, as its experts are different.
        each, device = layer.config.num_per_token, self._down.weight.device
        numbers = torch.arange(each, dtype=torch.int32, device=device)
        self._single = Tiles(FEW_ROWS, numbers, numbers, numbers, torch.ones_like(numbers))
        if layer.config.shared_size:
            self._shared_gate_up = fused_linear(layer.shared_gate_up)
            self._shared_down = fused_linear(layer.shared_down)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns its output for x, (T, hidden_size), on this rank."""
        layer = self._layer
        out = self._mixed(x, self._logits(x))
        if layer.config.shared_size:
            both = product(self._shared_gate_up, x)
            active = x.new_empty(len(x), both.shape[1] // 2)
            silu_mul(both, active)
            shared = product(self._shared_down, active)
            if layer.config.has_shared_gate:
                add_gated(x, plain(layer.shared_gate).weight, shared, out)
            else:
                out += shared
        return out

    def _logits(self, x: Tensor) -> Tensor:
        """Of the router: (T, num_experts). Where weights are sigmoids in float32, as corrections
        tell apart what is less than a rounding of x's type."""
        if not self._layer.config.has_sigmoids:
            return product(self._router, x)
        if len(x) > MAX_ROWS:
            return x.float() @ plain(self._layer.router).weight.float().t()
        out = torch.empty(len(x), self._router.out_features, device=x.device)
        self._router.few(x, out)
        return out

    def with_mlp(self, states: Tensor, given: Tensor) -> Tensor:
        """See `ExpertsLayer`; it is written to `given`."""
        layer, eps = self._layer, self._layer.eps
        routed, x = torch.empty_like(states), torch.empty_like(states)
        rms_norm(states, layer.router_norm, eps, routed)
        rms_norm(states, layer.input_norm, eps, x)
        change = self._mixed(x, product(self._router, routed))
        if layer.group is not None:  # one sum for both
            both = torch.stack((given, change))
            layer.group.all_reduce(both)
            given, change = both
        rms_norm(given, layer.mlp_norm, eps, given)
        add_rms_norm(change, given, None, eps, x, post=layer.output_norm)
        return given

    def _mixed(self, x: Tensor, logits: Tensor) -> Tensor:
        """See `ExpertsLayer.mixed`."""
        layer, experts = self._layer, self._layer.config
        routes = route(logits, experts, layer.factors, layer.corrections)
        if len(x) == 1:
            tiles = self._single._replace(experts=routes.experts[0])
        else:
            tiles = tiles_of(routes.experts, experts.num_experts)
        active, out = x.new_empty(len(tiles.order), experts.size), x.new_empty(x.shape)
        gate_up(x, self._gate_up, tiles, experts, active)
        down(active, self._down, tiles, routes.weights, out)
        return out


def plain(linear: Linear) -> PlainLinear:
    if not isinstance(linear, PlainLinear):
        formats = (PlainLinear.weight_format,)
        raise UnsupportedWeightFormat(linear.weight_format, EXPERTS_PATH, formats)
    return linear
