"""`StateShape`: what the pool of recurrent states needs to know of a model. Imports no tensors."""

from dataclasses import dataclass

# States and what the convolution has yet to read are kept in float32.
_ITEMSIZE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """The state of one sequence: in each of num_layers layers, num_heads matrices of key_dim rows
    and value_dim columns, and the last num_inputs inputs of each of num_channels convolutions."""

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int
    num_channels: int
    num_inputs: int

    @property
    def num_key_heads(self) -> int:
        """As many channels are queries as keys; the others are values, of num_heads."""
        return (self.num_channels - self.num_heads * self.value_dim) // (2 * self.key_dim)

    @property
    def num_bytes(self) -> int:
        matrices = self.num_heads * self.key_dim * self.value_dim
        inputs = self.num_channels * self.num_inputs
        return self.num_layers * (matrices + inputs) * _ITEMSIZE
