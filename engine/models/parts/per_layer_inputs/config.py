"""`PerLayerInputs` and `PerLayerInput`: the embeddings that each layer of Gemma 4 E2B and E4B has
of its own. Imports no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.engine.models.parts.tensors import Axis, LinearSpec, Part, VectorSpec, matrix

TABLE = "model.embed_tokens_per_layer"
PROJECTION = "model.per_layer_model_projection"


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInputs(Part):
    """Each token has a vector of this size in every layer: the token's row of a table, and the
    same of a projection of its embedding, added up.

    pad_id: whose row a token has that is not embedded, as those of an image. vocab_size: the
    table's rows. The table is no weight that a step reads, but for some rows. All
    ranks have all of it: its matrices are too narrow for what another sum over ranks takes.
    """

    LLAMA = (("size", 0, "per_layer_inputs"),)

    hidden_size: int
    num_layers: int
    size: int
    vocab_size: int
    pad_id: int = 0

    @property
    def table_shape(self) -> tuple[int, int]:
        return self.vocab_size, self.num_layers * self.size

    @property
    def linears(self) -> Mapping[str, LinearSpec]:
        """projection: of the embedded tokens, for all layers."""
        rows, hidden = Axis(self.num_layers * self.size), Axis(self.hidden_size)
        projection = matrix(PROJECTION, rows, hidden, "per_layer_model_proj")
        return {"projection": LinearSpec((projection,))}

    @property
    def vectors(self) -> Mapping[str, VectorSpec]:
        """norm: of what the projection gives to each layer."""
        name, gguf = "model.per_layer_projection_norm.weight", "per_layer_proj_norm.weight"
        return {"norm": VectorSpec(name, (Axis(self.size),), gguf=gguf)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInput(Part):
    """A layer adds to its states what it makes of its own input: a gate of the states, times the
    input, projected back."""

    hidden_size: int
    size: int

    @property
    def linears(self) -> Mapping[str, LinearSpec]:
        hidden, size = Axis(self.hidden_size), Axis(self.size)
        gate = matrix("per_layer_input_gate", size, hidden, "inp_gate")
        projection = matrix("per_layer_projection", hidden, size, "proj")
        return {"gate": LinearSpec((gate,)), "projection": LinearSpec((projection,))}

    @property
    def vectors(self) -> Mapping[str, VectorSpec]:
        name = "post_per_layer_input_norm.weight"
        return {"norm": VectorSpec(name, (Axis(self.hidden_size),), gguf="post_norm.weight")}
