"""What layers of Gemma 4 have besides those of Llama: experts beside the MLP, and per-layer inputs.

Source: transformers' Gemma4TextDecoderLayer and Gemma4TextModel.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.experts import ExpertsConfig
from penstock.engine.models.layers.experts import mixed
from penstock.engine.models.layers.linear import Linear, MakeLinear, read_linear, tensor_bytes
from penstock.engine.models.layers.norm import rms_norm
from penstock.engine.models.per_layer_inputs import NORM, PROJECTION, TABLE, PerLayerInputsConfig
from penstock.engine.models.weights import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsBeside:
    """Of one layer. gate_up, down: as in `Layer`. router_norm, input_norm: of what router and
    experts read. mlp_norm, output_norm: of what the MLP and the experts give, before both are
    added. factors: see `routes`.
    """

    experts: ExpertsConfig
    router: Linear
    router_norm: Tensor
    factors: Tensor
    gate_up: Linear
    down: Linear
    input_norm: Tensor
    mlp_norm: Tensor
    output_norm: Tensor

    @classmethod
    def read(
        cls,
        config: ModelConfig,
        experts: ExpertsConfig,
        weights: WeightSource,
        make_linear: MakeLinear,
        prefix: str,
    ) -> "ExpertsBeside":
        """prefix: of the layer's names."""
        hidden, num, size = config.hidden_size, experts.num_experts, experts.intermediate_size

        def stacked(rows: int, columns: int, names: list[str]) -> Linear:
            full_names = (prefix + name for name in names)
            return read_linear(weights, make_linear, num * rows, columns, *full_names)

        def vector(name: str, length: int = hidden) -> Tensor:
            return weights.read((length,), prefix + name).float()

        # Never quantized, as all routers.
        router = weights.read((num, hidden), f"{prefix}{experts.router}.weight")
        return cls(
            experts=experts,
            router=make_linear(router, None),
            router_norm=vector("router.scale") * hidden**-0.5,
            factors=vector("router.per_expert_scale", num),
            gate_up=stacked(2 * size, hidden, experts.gate_up_names()),
            down=stacked(hidden, size, experts.down_names()),
            input_norm=vector("pre_feedforward_layernorm_2.weight"),
            mlp_norm=vector("post_feedforward_layernorm_1.weight"),
            output_norm=vector("post_feedforward_layernorm_2.weight"),
        )

    def __call__(
        self,
        states: Tensor,
        of_mlp: Tensor,
        gated: Callable[[Tensor, Tensor], Tensor],
        eps: float,
        summed: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """The output of both. states: before the MLP and its norm, (T, hidden_size). of_mlp: what
        that gives, of this rank. gated: of gate and up. summed: over all ranks."""
        logits = self.router(rms_norm(states, self.router_norm, eps))
        x = rms_norm(states, self.input_norm, eps)
        change = mixed(self.experts, x, logits, self.gate_up, self.down, gated, self.factors)
        of_mlp, change = summed(torch.stack((of_mlp, change)))
        normed = rms_norm(of_mlp, self.mlp_norm, eps)
        return normed + rms_norm(change, self.output_norm, eps)

    @property
    def num_bytes(self) -> int:
        """Without experts."""
        norms = (self.router_norm, self.input_norm, self.mlp_norm, self.output_norm)
        return self.router.num_bytes + tensor_bytes(self.factors, *norms)

    @property
    def expert_bytes(self) -> int:
        return self.gate_up.num_bytes + self.down.num_bytes


@dataclass(frozen=True, slots=True)
class PerLayerInput:
    """Of one layer: what it adds to its states, by its own input of each token."""

    gate: Linear
    projection: Linear
    norm: Tensor

    @classmethod
    def read(
        cls, config: ModelConfig, weights: WeightSource, make_linear: MakeLinear, prefix: str
    ) -> "PerLayerInput | None":
        """None where the model has none. prefix: of the layer's names."""
        if config.per_layer_inputs is None:
            return None
        hidden = config.hidden_size
        gate, projection = (
            read_linear(weights, make_linear, *shape, prefix + name)
            for name, shape in config.per_layer_inputs.linear_shapes(hidden).items()
        )
        norm = weights.read((hidden,), f"{prefix}post_per_layer_input_norm.weight").float()
        return cls(gate, projection, norm)

    def __call__(self, states: Tensor, inputs: Tensor, eps: float) -> Tensor:
        """states: (T, hidden_size). inputs: (T, size)."""
        gates = functional.gelu(self.gate(states), approximate="tanh")
        return rms_norm(self.projection(gates * inputs), self.norm, eps)

    @property
    def num_bytes(self) -> int:
        return self.gate.num_bytes + self.projection.num_bytes + self.norm.nbytes


class PerLayerInputs:
    """Of all layers. A step reads one row of the table for each token.

    shape: the number of layers that are here, and the size of an input. scale: of what the
    projection gives.
    """

    def __init__(
        self,
        config: ModelConfig,
        inputs: PerLayerInputsConfig,
        weights: WeightSource,
        make_linear: MakeLinear,
        *,
        maps_table: bool,
    ) -> None:
        self.shape = (config.num_layers, inputs.size)
        self._eps = config.rms_norm_eps
        self.scale = config.hidden_size**-0.5
        read = weights.table if maps_table else weights.read
        self.table = read(inputs.table_shape(config.num_layers), f"{TABLE}.weight")
        shape = inputs.projection_shape(config.num_layers, config.hidden_size)
        self.projection = read_linear(weights, make_linear, *shape, PROJECTION)
        self.norm = weights.read((inputs.size,), f"{NORM}.weight").float()
        self.num_bytes = self.projection.num_bytes + self.norm.nbytes

    @classmethod
    def read(
        cls,
        config: ModelConfig,
        weights: WeightSource,
        make_linear: MakeLinear,
        *,
        maps_table: bool,
    ) -> "PerLayerInputs | None":
        """None where the model has none. maps_table: it stays in its file, where there is one,
        rather than in the memory of the other weights."""
        if config.per_layer_inputs is None:
            return None
        return cls(config, config.per_layer_inputs, weights, make_linear, maps_table=maps_table)

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Sequence[Tensor]:
        """For each layer (T, size). embedded: the states before the first, (T, hidden_size)."""
        rows = functional.embedding(token_ids.to(self.table.device), self.table).to(embedded)
        rows = rows.view(-1, *self.shape) * math.sqrt(self.shape[1])
        projected = (self.projection(embedded) * self.scale).view(-1, *self.shape)
        inputs = (rms_norm(projected, self.norm, self._eps) + rows) * math.sqrt(0.5)
        return inputs.unbind(1)

    def rows(self, token_ids: Tensor) -> Tensor:
        """What the table adds to the inputs of all layers: (T, num_layers * size) float32."""
        return functional.embedding(token_ids, self.table).float() * math.sqrt(self.shape[1])
