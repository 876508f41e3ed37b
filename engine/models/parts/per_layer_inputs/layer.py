"""Per-layer inputs in torch. Source: transformers' Gemma4TextModel and Gemma4TextDecoderLayer."""

import math
from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.parts.norm.layer import rms_norm
from penstock.engine.models.parts.per_layer_inputs.config import (
    TABLE,
    PerLayerInput,
    PerLayerInputs,
)
from penstock.engine.models.parts.reader import PartLayer, PartReader, rows_of


class PerLayerInputLayer(PartLayer[PerLayerInput]):
    gate: Linear
    projection: Linear
    norm: Tensor

    def __call__(self, states: Tensor, inputs: Tensor) -> Tensor:
        """Returns the layer's addition to its states, (T, hidden_size). inputs: (T, size)."""
        gates = functional.gelu(self.gate(states), approximate="tanh")
        return rms_norm(self.projection(gates * inputs), self.norm, self.eps)


class PerLayerInputsTable(PartLayer[PerLayerInputs]):
    """Makes the inputs of all layers. A step reads one row of the table for each token.

    shape: the number of layers that are here, and the size of an input. scale: of what the
    projection gives. table: None where it stays in its file.
    """

    projection: Linear
    norm: Tensor

    def __init__(self, config: PerLayerInputs, reader: PartReader, *, maps_table: bool) -> None:
        """maps_table: it stays in its file, where there is one, rather than in the memory of the
        other weights."""
        super().__init__(config, reader)
        self.shape = (config.num_layers, config.size)
        self.scale = config.hidden_size**-0.5
        weights, name, shape = reader.weights, f"{TABLE}.weight", config.table_shape
        self.table = table = None if maps_table else weights.read(shape, name)
        self._rows = weights.table(shape, name) if table is None else rows_of(table)

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Sequence[Tensor]:
        """For each layer (T, size). embedded: the states before the first, (T, hidden_size)."""
        rows = self._rows(token_ids).to(embedded)
        rows = rows.view(-1, *self.shape) * math.sqrt(self.shape[1])
        projected = (self.projection(embedded) * self.scale).view(-1, *self.shape)
        inputs = (rms_norm(projected, self.norm, self.eps) + rows) * math.sqrt(0.5)
        return inputs.unbind(1)

    def rows(self, token_ids: Tensor) -> Tensor:
        """Returns the table's addition to all layers' inputs: (T, num_layers * size) float32."""
        return self._rows(token_ids).float() * math.sqrt(self.shape[1])
