"""Per-layer inputs on a GPU."""

from torch import Tensor

from penstock.engine.models.layers.fused_linear import fused_linear, product
from penstock.engine.models.parts.per_layer_inputs import kernels
from penstock.engine.models.parts.per_layer_inputs.layer import (
    PerLayerInputLayer,
    PerLayerInputsTable,
)


class FusedPerLayerInputs:
    """Makes the inputs of all layers. pad_id: see `PerLayerInputs`."""

    def __init__(self, table: PerLayerInputsTable, eps: float) -> None:
        """Raises UnsupportedWeightFormat."""
        self._table = table
        self.pad_id = table.config.pad_id
        self._eps = eps
        self._projection = fused_linear(table.projection)

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """(T, num_layers, size). embedded: the states before the first layer, (T, hidden_size)."""
        table = self._table
        assert table.table is not None, "kernels read it in the GPU's memory"
        projected = product(self._projection, embedded).view(len(embedded), *table.shape)
        kernels.add_table_rows(
            projected, token_ids, table.table, table.norm, self._eps, table.scale
        )
        return projected


class FusedPerLayerInput:
    """norm: of what a call gives."""

    def __init__(self, layer: PerLayerInputLayer) -> None:
        """Raises UnsupportedWeightFormat."""
        self.norm = layer.norm
        self._gate = fused_linear(layer.gate)
        self._projection = fused_linear(layer.projection)

    def __call__(self, index: int, residual: Tensor, inputs: Tensor) -> Tensor:
        """A layer's change by its own input of each token. index: which layer it is. inputs: as
        `FusedPerLayerInputs` gives them."""
        gate = product(self._gate, residual)
        kernels.gate_input(gate, inputs, index)
        return product(self._projection, gate)
