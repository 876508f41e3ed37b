"""The linear layers of a model that adapters may change."""

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.parts.adapter import Projection


def projections(model: ModelConfig, layer: int) -> dict[str, Projection]:
    """Those that adapters may change, by their names in a checkpoint; in order. Experts and what
    chooses them are not among them."""
    found: dict[str, Projection] = {}
    for linear in model.layers[layer].tensors.linears:
        if linear.adapters is None:
            continue
        start = 0
        for matrix in linear.matrices:
            for name in matrix.names:
                found[name] = Projection(linear.adapters, start, *matrix.shape)
                start += matrix.num_rows
    return found


def max_adapter_bytes(model: ModelConfig, rank: int, itemsize: int) -> int:
    """Counts bytes of an adapter of this rank that changes all layers; on a GPU, of one slot."""
    per_rank = sum(
        each.out_features + each.in_features
        for layer in range(model.num_layers)
        for each in projections(model, layer).values()
    )
    return per_rank * rank * itemsize
