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
    assert not layer.config.shared_size, "the compiled step has no shared expert"
    num, size = layer.config.num_experts, layer.config.size
    gates_and_ups = packer.linears(layer.gate_up, *[size] * (2 * num))
    downs = packer.linears(layer.down, *[layer.config.hidden_size] * num)
    each = zip(gates_and_ups[::2], gates_and_ups[1::2], downs, strict=True)
    experts = [_EXPERT(*expert) for expert in each]
    norms = dict.fromkeys(("router_norm", "input_norm"), packer.norm(mlp_norm))
    if layer.config.is_beside_mlp:
        names = ("router_norm", "input_norm", "mlp_norm", "output_norm", "factors")
        norms = packer.norms(layer, *names)
    router = packer.linear(layer.router)
    return _LAYER(each=packer.array(_EXPERT, experts), router=router, **norms)


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
