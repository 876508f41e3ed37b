"""A mixture of experts in torch: which experts compute a token, and what they make of it.

The weights of all experts of a layer are stacked, so that they are read, quantized and packed as
any other layer. Source: Shazeer et al. 2017 (arXiv:1701.06538); the routing is Qwen3-MoE's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from penstock.engine.models.experts import ExpertsConfig
from penstock.engine.models.layers.linear import Linear


class Rows(Protocol):
    def rows(self, first: int, end: int) -> Linear:
        """The layer of these outputs alone. Its tensors are views."""
        ...


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """Computes every token. gate: (hidden_size,) to (1,), whose sigmoid is its weight."""

    gate_up: Linear
    down: Linear
    gate: Linear

    @property
    def num_bytes(self) -> int:
        return self.gate_up.num_bytes + self.down.num_bytes + self.gate.num_bytes

    def __call__(self, x: Tensor, gated: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """gated: of gate and up."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return torch.sigmoid(self.gate(x)) * self.down(gated(gate, up))


def routes(
    experts: ExpertsConfig, logits: Tensor, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts of each token, (T, num_per_token) int64, the likeliest first, and their weights
    in float32. logits: (T, num_experts). factors: of each expert's weight, (num_experts,) float32.
    Of equal logits the first expert's counts as higher."""
    logits = logits.float()
    chosen = logits.sort(dim=-1, descending=True, stable=True).indices[:, : experts.num_per_token]
    if experts.is_normed:
        weights = logits.gather(1, chosen).softmax(-1)
    else:
        weights = logits.softmax(-1).gather(1, chosen)
    return chosen, weights if factors is None else weights * factors[chosen]


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """gpt-oss's activation of both."""
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)


def mixed(
    experts: ExpertsConfig,
    x: Tensor,
    logits: Tensor,
    gate_up: Linear,
    down: Linear,
    gated: Callable[[Tensor, Tensor], Tensor],
    factors: Tensor | None = None,
) -> Tensor:
    """What the experts of each token make of it, added up by weight: (T, hidden_size).

    x: (T, hidden_size). logits: of the router, (T, num_experts). gate_up, down: of all experts, one
    after the other. gated: of gate and up. factors: see `routes`.
    """
    chosen, weights = routes(experts, logits, factors)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    size, hidden = 2 * experts.intermediate_size, x.shape[1]
    for expert in sorted({*chosen.flatten().tolist()}):
        tokens, rank = (chosen == expert).nonzero(as_tuple=True)
        gate, up = _rows(gate_up, expert, size)(x[tokens]).chunk(2, dim=-1)
        y = _rows(down, expert, hidden)(gated(gate, up))
        total.index_add_(0, tokens, y.float() * weights[tokens, rank].unsqueeze(1))
    return total.to(x.dtype)


def _rows(stacked: Linear, expert: int, size: int) -> Linear:
    return cast(Rows, stacked).rows(expert * size, (expert + 1) * size)
