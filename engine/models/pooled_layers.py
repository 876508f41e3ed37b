"""Dense layers on the pooled state of a text, in torch: see `PooledHead`."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.files.json_file import Fields
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.families.pooled_heads import Dense, PooledHead
from penstock.engine.models.parts.reader import WeightSource
from penstock.engine.models.weights import Checkpoint, RandomWeights

_ACTIVATIONS = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
}


class PooledLayers:
    """A `PooledHead` with its weights, which are float32 whatever the model's type is."""

    def __init__(
        self, head: PooledHead, model_dir: Path, device: torch.device, *, is_made_up: bool
    ) -> None:
        """is_made_up: its weights are random. Raises InvalidModel."""
        empty = partial(torch.empty, dtype=torch.float32, device=device)
        self._layers: list[tuple[Dense, dict[str, Tensor]]] = []
        for layer in head.layers:
            source: WeightSource = RandomWeights(empty)
            if not is_made_up:
                source = Checkpoint(model_dir / layer.directory, empty)
            if layer.tokens:
                ids = torch.tensor([_token_id(each, layer, model_dir) for each in layer.tokens])
                rows = source.table(layer.shape, f"{layer.name}.weight")(ids).float().to(device)
                weights = {f"{layer.name}.weight": rows[:1] - rows[1:].sum(0)}
            else:
                weights = {name: source.read(layer.shape_of(name), name) for name in layer.tensors}
            self._layers.append((layer, weights))

    def __call__(self, state: Tensor) -> Tensor:
        """state: (hidden_size,) float32. Returns (size,). One text at a time: the bits of a product
        depend on how many rows it has."""
        for layer, weights in self._layers:
            weight, bias = weights[f"{layer.name}.weight"], weights.get(f"{layer.name}.bias")
            state = _ACTIVATIONS[layer.activation](functional.linear(state, weight, bias))
            if layer.norm:
                norm, bias = weights[f"{layer.norm}.weight"], weights.get(f"{layer.norm}.bias")
                state = functional.layer_norm(state, norm.shape, norm, bias, layer.eps)
        return state


def _token_id(token: int | str, layer: Dense, model_dir: Path) -> int:
    """token: its id, or its text."""
    vocab_size = layer.shape[0]
    if isinstance(token, str):
        path = model_dir / "tokenizer.json"
        ids = Fields(f"{path}: model", Fields.read(path).mapping("model")).mapping("vocab")
        token = ids.get(token, vocab_size)
    if not isinstance(token, int) or token >= vocab_size:
        raise InvalidModel(
            f"{model_dir} is to score texts by a token that its vocabulary does not have"
        )
    return token
