"""A mixture of experts in torch: which experts compute a token, and what they make of it.

The weights of all experts of a layer are stacked, so that they are read, quantized and packed as
any other layer. Source: Shazeer et al. 2017 (arXiv:1701.06538); the routing is Qwen3-MoE's.
"""

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from penstock.engine.models.layers.linear import Linear, tensor_bytes
from penstock.engine.models.parts.experts.config import Experts
from penstock.engine.models.parts.mlp.config import SILU, Activation
from penstock.engine.models.parts.mlp.layer import gated
from penstock.engine.models.parts.norm.layer import rms_norm
from penstock.engine.models.parts.reader import PartReader, summed
from penstock.engine.ranks.group import Group


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
    activation: Activation = SILU

    @property
    def num_bytes(self) -> int:
        return self.gate_up.num_bytes + self.down.num_bytes + self.gate.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        active = gated(self.activation, *self.gate_up(x).chunk(2, dim=-1))
        return torch.sigmoid(self.gate(x)) * self.down(active)


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideMLP:
    """What experts beside an MLP have besides: see `Experts.vectors`."""

    router_norm: Tensor
    input_norm: Tensor
    mlp_norm: Tensor
    output_norm: Tensor
    factors: Tensor

    @classmethod
    def read(cls, config: Experts, reader: PartReader) -> "BesideMLP":
        vectors = {name: reader.wide(spec) for name, spec in config.vectors.items()}
        vectors["router_norm"] *= config.hidden_size**-0.5
        return cls(**vectors)

    @property
    def num_bytes(self) -> int:
        norms = (self.router_norm, self.input_norm, self.mlp_norm, self.output_norm)
        return tensor_bytes(self.factors, *norms)


class ExpertsLayer:
    """One layer's weights. gate_up, down: of all experts, one after the other, (experts * 2 * size,
    hidden_size) and (experts * hidden_size, size). group: of ranks that have another part of each
    expert."""

    def __init__(self, config: Experts, reader: PartReader, group: Group | None) -> None:
        linears = {name: reader.linear(spec) for name, spec in config.linears.items()}
        self.config = config
        self.eps = reader.eps
        self.group = group
        self.router, self.gate_up, self.down = (
            linears[name] for name in ("router", "gate_up", "down")
        )
        self.shared: SharedExpert | None = None
        if config.shared_size:
            gate_up, down = linears["shared_gate_up"], linears["shared_down"]
            gate = linears["shared_gate"]
            self.shared = SharedExpert(gate_up, down, gate, config.activation)
        self.beside = BesideMLP.read(config, reader) if config.is_beside_mlp else None

    @property
    def num_bytes(self) -> int:
        """Without the experts that a router chooses from."""
        parts = (self.router, self.shared, self.beside)
        return sum(part.num_bytes for part in parts if part is not None)

    @property
    def expert_bytes(self) -> int:
        return self.gate_up.num_bytes + self.down.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """What they make of x, (T, hidden_size), on this rank."""
        y = mixed(self.config, x, self.router(x), self.gate_up, self.down)
        return y if self.shared is None else y + self.shared(x)

    def with_mlp(self, states: Tensor, given: Tensor) -> Tensor:
        """What they and the MLP beside them give together, on all ranks. states: before the MLP and
        its norm, (T, hidden_size). given: by the MLP, on this rank."""
        beside, eps = self.beside, self.eps
        assert beside is not None, "experts beside an MLP"
        logits = self.router(rms_norm(states, beside.router_norm, eps))
        x = rms_norm(states, beside.input_norm, eps)
        change = mixed(self.config, x, logits, self.gate_up, self.down, beside.factors)
        given, change = summed(self.group, torch.stack((given, change)))
        normed = rms_norm(given, beside.mlp_norm, eps)
        return normed + rms_norm(change, beside.output_norm, eps)


def routes(
    experts: Experts, logits: Tensor, factors: Tensor | None = None
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


def mixed(
    experts: Experts,
    x: Tensor,
    logits: Tensor,
    gate_up: Linear,
    down: Linear,
    factors: Tensor | None = None,
) -> Tensor:
    """What the experts of each token make of it, added up by weight: (T, hidden_size).

    x: (T, hidden_size). logits: of the router, (T, num_experts). gate_up, down: of all experts, one
    after the other. factors: see `routes`.
    """
    chosen, weights = routes(experts, logits, factors)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    size, hidden = 2 * experts.size, x.shape[1]
    for expert in sorted({*chosen.flatten().tolist()}):
        tokens, rank = (chosen == expert).nonzero(as_tuple=True)
        gate, up = _rows(gate_up, expert, size)(x[tokens]).chunk(2, dim=-1)
        y = _rows(down, expert, hidden)(gated(experts.activation, gate, up))
        total.index_add_(0, tokens, y.float() * weights[tokens, rank].unsqueeze(1))
    return total.to(x.dtype)


def _rows(stacked: Linear, expert: int, size: int) -> Linear:
    return cast(Rows, stacked).rows(expert * size, (expert + 1) * size)
