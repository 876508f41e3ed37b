"""Owns the memory of recurrent states. Knows states, not sequences."""

from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.engine.memory.host import zeros_on_touch
from penstock.engine.memory.pool.state_shape import StateShape


class StatePool:
    """matrices: (num_layers, num_states, num_heads, key_dim, value_dim). inputs: the last of each
    convolution, (num_layers, num_states, num_inputs, num_channels). Both float32.
    """

    def __init__(self, shape: StateShape, num_states: int, device: torch.device) -> None:
        def zeros(*each: int) -> Tensor:
            sizes = (shape.num_layers, num_states, *each)
            if device.type != "cpu":
                return torch.zeros(sizes, dtype=torch.float32, device=device)
            # A state takes memory when it is first used.
            return zeros_on_touch(sizes, torch.float32)

        self.matrices = zeros(shape.num_heads, shape.key_dim, shape.value_dim)
        self.inputs = zeros(shape.num_inputs, shape.num_channels)

    def reach(self, block_ids: Iterable[int]) -> None:
        """See `KVPool`."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """The matrices and the inputs of one layer."""
        return self.matrices[index], self.inputs[index]

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """(source, target): each target gets its source's content, in every layer, all at once."""
        sources, targets = ([pair[i] for pair in copies] for i in (0, 1))
        for tensor in (self.matrices, self.inputs):
            tensor[:, targets] = tensor[:, sources]
