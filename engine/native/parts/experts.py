"""Packs experts: see `ExpertsLayer` and `Experts` of structs.h."""

from ctypes import Structure

from torch import Tensor

from penstock.engine.models.parts.experts.config import Experts
from penstock.engine.models.parts.experts.layer import ExpertsLayer
from penstock.engine.native.packing import Packer
from penstock.engine.native.structures import structure

_EXPERT, _LAYER, _EXPERTS = map(structure, ("Expert", "ExpertsLayer", "Experts"))


def pack_experts(packer: Packer, layer: ExpertsLayer, mlp_norm: Tensor | None) -> Structure:
    """mlp_norm: the norm of what router and experts read where the layer has no MLP."""
    num, size = layer.config.num_experts, layer.config.size
    gates_and_ups = packer.linears(layer.gate_up, *[size] * (2 * num))
    downs = packer.linears(layer.down, *[layer.config.hidden_size] * num)
    each = zip(gates_and_ups[::2], gates_and_ups[1::2], downs, strict=True)
    packed = _LAYER(
        each=packer.array(_EXPERT, [_EXPERT(*expert) for expert in each]),
        router=packer.linear(layer.router),
    )
    if (beside := layer.beside) is None:
        packed.router_norm = packed.input_norm = packer.norm(mlp_norm)
        return packed
    packed.router_norm, packed.input_norm = map(
        packer.norm, (beside.router_norm, beside.input_norm)
    )
    packed.mlp_norm, packed.output_norm = map(packer.norm, (beside.mlp_norm, beside.output_norm))
    packed.factors = packer.norm(beside.factors)
    return packed


def describe_experts(config: Experts | None) -> Structure:
    """Returns what all layers with experts have in common."""
    if config is None:
        return _EXPERTS()
    alpha, limit = config.activation.clamp or (0.0, 0.0)
    return _EXPERTS(
        num=config.num_experts,
        each=config.num_per_token,
        size=config.size,
        are_weights_normed=config.is_normed,
        swiglu_alpha=alpha,
        swiglu_limit=limit,
    )
