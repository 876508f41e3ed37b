"""`PerLayerInputsConfig`: the embeddings that each layer of Gemma 4 E2B and E4B has of its own.
Imports no tensors."""

from dataclasses import dataclass

TABLE = "model.embed_tokens_per_layer"
PROJECTION = "model.per_layer_model_projection"
NORM = "model.per_layer_projection_norm"


@dataclass(frozen=True, slots=True)
class PerLayerInputsConfig:
    """Of each token, every layer has a vector of this size: the token's row of a table, and the
    same of a projection of its embedding, added up. A layer adds to its states what it makes of it:
    a gate of the states, times the vector, projected back.

    vocab_size: the table's rows.
    """

    size: int
    vocab_size: int

    def linear_shapes(self, hidden_size: int) -> dict[str, tuple[int, int]]:
        """As `ModelConfig.linear_shapes`, of one layer."""
        return {
            "per_layer_input_gate": (self.size, hidden_size),
            "per_layer_projection": (hidden_size, self.size),
        }

    def table_shape(self, num_layers: int) -> tuple[int, int]:
        return self.vocab_size, num_layers * self.size

    def num_table_weights(self, num_layers: int) -> int:
        return self.vocab_size * num_layers * self.size

    def projection_shape(self, num_layers: int, hidden_size: int) -> tuple[int, int]:
        """Of the matrix that gives the projections of all layers."""
        return num_layers * self.size, hidden_size

    def num_projection_weights(self, num_layers: int, hidden_size: int) -> int:
        return num_layers * self.size * hidden_size
