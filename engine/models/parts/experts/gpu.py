"""A layer's experts on the GPU: five kernels of few tokens, and a sort before them of more."""

from torch import Tensor

from penstock.engine.kernels.activation import add_gated, silu_mul
from penstock.engine.models.errors import UnsupportedWeightFormat
from penstock.engine.models.layers.fused_linear import fused_linear, product
from penstock.engine.models.layers.linear import Linear, PlainLinear
from penstock.engine.models.parts.experts.config import Experts
from penstock.engine.models.parts.experts.kernels.products import down, gate_up
from penstock.engine.models.parts.experts.kernels.routing import route, tiles_of
from penstock.engine.models.parts.experts.layer import ExpertsLayer

EXPERTS_PATH = "the GPU's step for experts"


class FusedExperts:
    """It waits for nothing, so a CUDA graph may hold it. Tokens that only pad a graph are routed as
    others are."""

    def __init__(
        self,
        experts: Experts,
        router: Linear,
        gate_up: Linear,
        down: Linear,
        factors: Tensor | None = None,
    ) -> None:
        """gate_up, down: see `ExpertsLayer`. factors: as of `route`. Raises
        UnsupportedWeightFormat."""
        self._experts = experts
        self._factors = factors
        self._router = fused_linear(router)
        self._gate_up, self._down = plain(gate_up), plain(down)

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """Returns the sum of each token's experts: (T, hidden_size). routed: the router's input,
        where that is not x."""
        experts = self._experts
        logits = product(self._router, x if routed is None else routed)
        routes = route(
            logits, experts.num_per_token, is_normed=experts.is_normed, factors=self._factors
        )
        tiles = tiles_of(routes.experts, experts.num_experts)
        active = x.new_empty(len(tiles.order), experts.size)
        each, weight, bias = experts.num_per_token, self._gate_up.weight, self._gate_up.bias
        by = experts.activation
        gate_up(x, weight, bias, tiles, each, active, by.clamp, is_gelu=by.is_gelu)
        out = x.new_empty(x.shape)
        down(active, self._down.weight, self._down.bias, routes.weights, tiles, out)
        return out


class FusedSharedExpert:
    """The expert that computes every token."""

    def __init__(self, layer: ExpertsLayer) -> None:
        """Raises UnsupportedWeightFormat."""
        self._gate_up = fused_linear(layer.shared_gate_up)
        self._down = fused_linear(layer.shared_down)
        self._gate = plain(layer.shared_gate)

    def add(self, x: Tensor, out: Tensor) -> None:
        """Adds what it makes of each token, by the weight that its gate gives: (T, hidden_size)."""
        both = product(self._gate_up, x)
        active = x.new_empty(len(x), both.shape[1] // 2)
        silu_mul(both, active)
        add_gated(x, self._gate.weight, product(self._down, active), out)


def plain(linear: Linear) -> PlainLinear:
    if not isinstance(linear, PlainLinear):
        formats = (PlainLinear.weight_format,)
        raise UnsupportedWeightFormat(linear.weight_format, EXPERTS_PATH, formats)
    return linear
