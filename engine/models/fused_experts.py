"""A layer's experts on the GPU: five kernels of few tokens, and a sort before them of more."""

from torch import Tensor

from penstock.engine.kernels.experts.products import down, gate_up
from penstock.engine.kernels.experts.routing import route, tiles_of
from penstock.engine.kernels.linear import MAX_ROWS
from penstock.engine.models.errors import UnsupportedWeightFormat
from penstock.engine.models.experts import ExpertsConfig
from penstock.engine.models.fused_linear import FUSED_LINEARS
from penstock.engine.models.layers.linear import Linear, PlainLinear

EXPERTS_PATH = "the GPU's step for experts"


class FusedExperts:
    """It waits for nothing, so a CUDA graph may hold it. Tokens that only pad a graph are routed as
    others are."""

    def __init__(
        self,
        experts: ExpertsConfig,
        router: Linear,
        gate_up: Linear,
        down: Linear,
        clamp: tuple[float, float] | None = None,
        *,
        is_gelu: bool = False,
        factors: Tensor | None = None,
    ) -> None:
        """gate_up, down: see `penstock.engine.models.llama.Layer`. clamp: see
        `ModelConfig.clamped_swiglu`. is_gelu: as of `gate_up`. factors: as of `route`. Raises
        UnsupportedWeightFormat."""
        self._experts = experts
        self._clamp = clamp
        self._is_gelu = is_gelu
        self._factors = factors
        self._router = FUSED_LINEARS.of(router)
        self._gate_up, self._down = plain(gate_up), plain(down)

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """What the experts of each token make of it: (T, hidden_size). routed: what the router
        reads, where that is not x."""
        experts, num_tokens = self._experts, len(x)
        routed = x if routed is None else routed
        if num_tokens <= MAX_ROWS:
            logits = x.new_empty(num_tokens, experts.num_experts)
            self._router.few(routed, logits)
        else:
            logits = self._router.many(routed)
        routes = route(
            logits, experts.num_per_token, is_normed=experts.is_normed, factors=self._factors
        )
        tiles = tiles_of(routes.experts, experts.num_experts)
        active = x.new_empty(len(tiles.order), experts.intermediate_size)
        each, weight, bias = experts.num_per_token, self._gate_up.weight, self._gate_up.bias
        gate_up(x, weight, bias, tiles, each, active, self._clamp, is_gelu=self._is_gelu)
        out = x.new_empty(x.shape)
        down(active, self._down.weight, self._down.bias, routes.weights, tiles, out)
        return out


def plain(linear: Linear) -> PlainLinear:
    if not isinstance(linear, PlainLinear):
        formats = (PlainLinear.weight_format,)
        raise UnsupportedWeightFormat(linear.weight_format, EXPERTS_PATH, formats)
    return linear
