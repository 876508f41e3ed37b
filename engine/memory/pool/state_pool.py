"""Owns the memory of recurrent states. Knows states, not sequences."""

import torch
from torch import Tensor

from penstock.engine.memory.pool.kv_memory import MappedPool
from penstock.engine.memory.pool.pool_tensors import PoolTensors, TensorShape
from penstock.engine.memory.pool.state_shape import StateShape


class StatePool(PoolTensors):
    """matrices: (num_layers, num_states, num_heads, key_dim, value_dim). inputs: the last of each
    convolution, (num_layers, num_states, num_inputs, num_channels). Both float32.
    """

    def __init__(
        self,
        shape: StateShape,
        num_states: int,
        device: torch.device,
        mapped: MappedPool | None = None,
    ) -> None:
        super().__init__(self.shapes(shape, num_states), device, mapped)
        self.matrices, self.inputs = self.tensors

    @staticmethod
    def shapes(shape: StateShape, num_states: int) -> list[TensorShape]:
        each = (
            (shape.num_heads, shape.key_dim, shape.value_dim),
            (shape.num_inputs, shape.num_channels),
        )
        return [((shape.num_layers, num_states, *sizes), torch.float32) for sizes in each]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """The matrices and the inputs of one layer."""
        return self.matrices[index], self.inputs[index]

    def pairs(self) -> list[tuple[Tensor, ...]]:
        """See `KVPool`: all that belongs to a state."""
        return [(self.matrices, self.inputs)]

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """(source, target): each target gets its source's content, in every layer, all at once."""
        sources, targets = ([pair[i] for pair in copies] for i in (0, 1))
        for tensor in (self.matrices, self.inputs):
            tensor[:, targets] = tensor[:, sources]
