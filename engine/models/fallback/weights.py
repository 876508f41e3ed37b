"""Counts the weights of a class that a step must read and compute, by its modules."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.engine.step.model_info import RoutedExperts

# These settings of transformers say how many experts each token is routed to.
_NUM_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCount:
    """num_bytes: of all. step_bytes, experts, flops_per_token: as in `ModelInfo`; where it is not
    known how many experts a token is routed to, step_bytes has all of them."""

    num_parameters: int
    num_bytes: int
    step_bytes: int
    flops_per_token: int
    experts: RoutedExperts | None

    @classmethod
    def of(cls, network: Any) -> "WeightCount":
        """network: transformers' model."""
        parameters = list(network.parameters())
        gathered, output = network.get_input_embeddings(), network.get_output_embeddings()
        num_bytes = sum(each.nbytes for each in parameters)
        step_bytes = num_bytes
        tables = {id(gathered.weight)}
        if output is not None:
            tables.add(id(output.weight))
        if output is None or output.weight is not gathered.weight:
            step_bytes -= gathered.weight.nbytes
        experts, num_expert_weights = _experts(network)
        matrices = sum(
            each.numel() for each in parameters if each.dim() > 1 and id(each) not in tables
        )
        if experts is not None:
            step_bytes -= experts.num_layers * experts.num_experts * experts.expert_bytes
            share = experts.num_experts_per_token / experts.num_experts
            matrices -= int(num_expert_weights * (1 - share))
        return cls(
            num_parameters=sum(each.numel() for each in parameters),
            num_bytes=num_bytes,
            step_bytes=step_bytes,
            flops_per_token=2 * matrices,
            experts=experts,
        )


def _experts(network: Any) -> tuple[RoutedExperts | None, int]:
    """And how many weights all of them have."""
    layers = [own for module in network.modules() if (own := _stacked(module))]
    chosen = next((n for name in _NUM_CHOSEN if (n := getattr(network.config, name, None))), None)
    sizes = {(len(own[0]), sum(each.nbytes for each in own)) for own in layers}
    # Layers that differ would need more than one record.
    if not isinstance(chosen, int) or len(sizes) != 1:
        return None, 0
    ((num_experts, num_bytes),) = sizes
    experts = RoutedExperts(
        num_layers=len(layers),
        num_experts=num_experts,
        num_experts_per_token=chosen,
        expert_bytes=num_bytes // num_experts,
    )
    return experts, sum(each.numel() for own in layers for each in own)


def _stacked(module: nn.Module) -> list[nn.Parameter]:
    """A layer's experts, where all are in the same tensors, by their first dimension."""
    num_experts = getattr(module, "num_experts", None)
    own = [each for each in module.parameters(recurse=False) if each.dim() > 1]
    is_stacked = any(each.dim() == 3 for each in own)
    return own if is_stacked and all(len(each) == num_experts for each in own) else []
