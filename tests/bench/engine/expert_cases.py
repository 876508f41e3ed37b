"""A layer's experts, the router included, in the shape of Qwen3-30B-A3B's."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.models.layers.linear import Linear, PlainLinear
from penstock.engine.models.parts.experts.config import Experts
from penstock.engine.models.parts.experts.gpu import FusedExperts
from penstock.engine.models.parts.experts.layer import ExpertsLayer, routes
from tests.bench.engine.case import Bench, Case, MakeCase, size_of
from tests.bench.engine.timing import relative_error
from tests.support.mixtures import drawn

_LAYER = Experts(hidden_size=2048, num_experts=128, num_per_token=8, size=768, is_normed=True)
_TOY = Experts(hidden_size=40, num_experts=5, num_per_token=2, size=24, is_normed=True)
_TOKENS, _CHECKED_TOKENS, _TINY_TOKENS = (1, 8, 64, 256, 1024), (1, 12, 70), (3,)


def experts(bench: Bench) -> Iterator[MakeCase]:
    config = _TOY if bench.tiny else _LAYER
    for tokens in bench.pick(_TOKENS, _CHECKED_TOKENS, _TINY_TOKENS):
        yield partial(_case, bench, config, tokens)


@torch.inference_mode()
def _case(bench: Bench, config: Experts, tokens: int) -> Case:
    layer, x = drawn(config, bench.dtype), bench.random(tokens, config.hidden_size)
    ours = FusedExperts(layer)
    out = ours(x)
    # Of all experts that as many tokens choose, if each chose by itself.
    share = 1 - (1 - config.num_per_token / config.num_experts) ** tokens
    weights = size_of(_weight(layer.gate_up), _weight(layer.down))
    return Case(
        kernel="experts",
        at={"experts": config.num_experts, "tokens": tokens},
        calls=[partial(ours, x)],
        error=lambda: relative_error(ours(x), _reference(layer, x)),
        num_bytes=int(share * weights) + size_of(x, out),
        flops=6 * tokens * config.num_per_token * config.hidden_size * config.size,
        tolerances=5,  # three products, each of the rounded results of the one before
    )


def _reference(layer: ExpertsLayer, x: Tensor) -> Tensor:
    """In float64. Every expert computes every token; the router is the layer's own, so that the
    same experts are chosen."""
    config, wide = layer.config, x.double()
    chosen, weights = routes(config, layer.router(x))
    shares = wide.new_zeros(len(x), config.num_experts)
    shares.scatter_(1, chosen, weights.double())
    total = torch.zeros_like(wide)
    gate_up = _weight(layer.gate_up).view(config.num_experts, 2, config.size, config.hidden_size)
    down = _weight(layer.down).view(config.num_experts, config.hidden_size, config.size)
    for expert, (gate, up) in enumerate(gate_up):
        active = functional.silu(wide @ gate.double().T) * (wide @ up.double().T)
        total += shares[:, expert, None] * (active @ down[expert].double().T)
    return total


def _weight(linear: Linear) -> Tensor:
    assert isinstance(linear, PlainLinear)
    return linear.weight
