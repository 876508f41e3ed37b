"""A mixture of experts in torch: which experts compute a token, and what they make of it.

The weights of all experts of a layer are stacked, so that they are read, quantized and packed as
any other layer. Source: Shazeer et al. 2017 (arXiv:1701.06538); the routing is Qwen3-MoE's.
"""

import math
from typing import cast

import torch
from torch import Tensor

from penstock.engine.models.layers.linear import Linear, StoredLinear
from penstock.engine.models.parts.experts.config import LEAST_SUM, Experts
from penstock.engine.models.parts.mlp.layer import gated
from penstock.engine.models.parts.norm.layer import rms_norm
from penstock.engine.models.parts.reader import PartLayer, PartReader, summed


class ExpertsLayer(PartLayer[Experts]):
    """gate_up, down: of all experts, one after the other, (experts * 2 * size, hidden_size) and
    (experts * hidden_size, size). shared_gate: of the shared expert, (hidden_size,) to (1,), whose
    sigmoid is its weight. corrections, and the norms and factors of experts beside an MLP: see
    `Experts.vectors`. group: of ranks that have another part of each expert."""

    router: Linear
    gate_up: Linear
    down: Linear
    shared_gate_up: Linear
    shared_down: Linear
    shared_gate: Linear
    router_norm: Tensor
    input_norm: Tensor
    mlp_norm: Tensor
    output_norm: Tensor
    factors: Tensor | None = None
    corrections: Tensor | None = None

    def __init__(self, config: Experts, reader: PartReader) -> None:
        super().__init__(config, reader)
        if config.is_beside_mlp:
            self.router_norm *= config.hidden_size**-0.5

    def __call__(self, x: Tensor) -> Tensor:
        """Returns its output for x, (T, hidden_size), on this rank."""
        y = self.mixed(x, self.router(x))
        if not self.config.shared_size:
            return y
        active = gated(self.config.activation, *self.shared_gate_up(x).chunk(2, dim=-1))
        shared = self.shared_down(active)
        if self.config.has_shared_gate:
            shared = torch.sigmoid(self.shared_gate(x)) * shared
        return y + shared

    def with_mlp(self, states: Tensor, given: Tensor) -> Tensor:
        """Adds up their output and the MLP's beside them, on all ranks. states: before the MLP and
        its norm, (T, hidden_size). given: by the MLP, on this rank."""
        assert self.config.is_beside_mlp, self.config
        logits = self.router(rms_norm(states, self.router_norm, self.eps))
        x = rms_norm(states, self.input_norm, self.eps)
        given, change = summed(self.group, torch.stack((given, self.mixed(x, logits))))
        normed = rms_norm(given, self.mlp_norm, self.eps)
        return normed + rms_norm(change, self.output_norm, self.eps)

    def mixed(self, x: Tensor, logits: Tensor) -> Tensor:
        """Adds up the outputs of each token's experts by weight: (T, hidden_size), as x. logits: of
        the router, (T, num_experts)."""
        config = self.config
        chosen, weights = routes(config, logits, self.factors, self.corrections)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        size, hidden = 2 * config.size, x.shape[1]
        for expert in sorted({*chosen.flatten().tolist()}):
            tokens, rank = (chosen == expert).nonzero(as_tuple=True)
            gate, up = _rows(self.gate_up, expert, size)(x[tokens]).chunk(2, dim=-1)
            y = _rows(self.down, expert, hidden)(gated(config.activation, gate, up))
            total.index_add_(0, tokens, y.float() * weights[tokens, rank].unsqueeze(1))
        return total.to(x.dtype)


def routes(
    experts: Experts,
    logits: Tensor,
    factors: Tensor | None = None,
    corrections: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The experts of each token, (T, num_per_token) int64, those chosen first before others, and
    their weights in float32. logits: (T, num_experts). factors, corrections: see `Experts.vectors`,
    (num_experts,) float32. Of what is equal the first expert's, or group's, counts as higher."""
    logits = logits.float()
    choices = torch.sigmoid(logits) if experts.has_sigmoids else logits
    if corrections is not None:
        choices = choices + corrections
    if experts.num_groups > 1:
        if not experts.has_sigmoids:
            choices = (logits - logits.amax(-1, keepdim=True)).exp()
        choices = _in_best_groups(experts, choices)
    chosen = _best(choices, experts.num_per_token)
    if experts.has_sigmoids:
        weights = torch.sigmoid(logits.gather(1, chosen))
        if experts.is_normed:
            weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    elif experts.is_normed:
        weights = logits.gather(1, chosen).softmax(-1)
    else:
        weights = logits.softmax(-1).gather(1, chosen)
    weights = weights * experts.weight_factor
    return chosen, weights if factors is None else weights * factors[chosen]


def _in_best_groups(experts: Experts, choices: Tensor) -> Tensor:
    """choices: (T, num_experts), for experts of other groups less than any."""
    groups = choices.view(len(choices), experts.num_groups, -1)
    totals = groups.topk(experts.num_best, dim=-1).values.sum(-1)
    best = _best(totals, experts.num_groups_used)
    is_other = torch.ones_like(totals, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(is_other.unsqueeze(-1), -math.inf).flatten(1)


def _best(values: Tensor, count: int) -> Tensor:
    """The columns of the highest of each row, in their order."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _rows(stacked: Linear, expert: int, size: int) -> Linear:
    return cast(StoredLinear, stacked).rows(expert * size, (expert + 1) * size)
