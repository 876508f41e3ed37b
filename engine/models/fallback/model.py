"""`TransformersModel`: a class of transformers as a `Model`, over the paged pool.

The class computes all but attention: embeddings, layers, the output layer with what it does to the
logits. All on one device; steps and logits are on the host, as the executor has them.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.memory.pool.kv_pool import LayerPools
from penstock.engine.memory.pool.kv_shape import KVShape
from penstock.engine.models.fallback.attention import (
    PAGED,
    TRACED,
    Attends,
    AttentionLayer,
    PagedStep,
    attending,
)
from penstock.engine.models.fallback.source import UnsupportedClass, calling
from penstock.engine.models.fallback.trace import Trace, register
from penstock.engine.step.model_input import ModelInput

_TRACED_TOKENS = 6


class TransformersModel:
    """See `penstock.engine.models.decoder.model.Model`."""

    def __init__(self, network: Any, max_model_len: int) -> None:
        """network: transformers' model, with its weights. Raises UnsupportedClass."""
        register()
        self.network = network.eval()
        self.architecture = type(network).__name__
        # Some classes have another prefix than their base model's name.
        name = network.base_model_prefix
        name = name if hasattr(network, name) else "model"
        self._base = getattr(network, name)
        self.layers, output_type = self._trace(max_model_len)
        self._stand_in = _StandIn(output_type)
        # Shares all with the network but the base model, so that it makes logits of given states.
        self._head = copy.copy(network)
        self._head._modules = {**network._modules, name: self._stand_in}
        network.set_attn_implementation(PAGED)

    def __call__(self, step: ModelInput, pool: LayerPools) -> Tensor:
        return self.logits(self.states(step, pool, step.sample_rows))

    def states(self, step: ModelInput, pool: LayerPools, rows: Tensor) -> Tensor:
        device = self.network.device
        here = step.to(device)
        paged = PagedStep(self.layers, here, pool)
        output = self._run(self._base, here.token_ids, here.positions, paged)
        states: Tensor = output.last_hidden_state[0][rows.to(device)]
        return states.to(step.token_ids.device)

    def logits(self, states: Tensor) -> Tensor:
        ids = torch.zeros(1, len(states), dtype=torch.int64, device=self.network.device)
        self._stand_in.states = states.to(self.network.device)[None]
        logits: Tensor = self._head(input_ids=ids, use_cache=False).logits[0]
        return logits.float().to(states.device)

    @property
    def kv_shape(self) -> KVShape:
        """That holds the widest of the layers."""
        layers = self.layers.values()
        return KVShape.of(
            num_layers=len(layers),
            num_kv_heads=max(layer.num_kv_heads for layer in layers),
            head_dim=max(max(layer.key_dim, layer.value_dim) for layer in layers),
        )

    def _trace(self, max_model_len: int) -> tuple[Mapping[nn.Module, AttentionLayer], type[Any]]:
        trace = Trace(self.architecture, max_model_len)
        self.network.set_attn_implementation(TRACED)
        positions = torch.arange(min(_TRACED_TOKENS, max_model_len), device=self.network.device)
        with calling(self.architecture):
            output = self._run(self._base, positions, positions, trace)
        if not trace.layers:
            raise UnsupportedClass(
                self.architecture, "it computes attention itself, or something else in its place"
            )
        return trace.layers, type(output)

    def _run(self, base: Any, token_ids: Tensor, positions: Tensor, attends: Attends) -> Any:
        with attending(attends):
            return base(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                return_dict=True,
            )


class _StandIn(nn.Module):
    """Takes the place of a base model and returns the states that were set."""

    def __init__(self, output_type: type[Any]) -> None:
        super().__init__()
        self._output_type = output_type
        self.states: Tensor | None = None

    @property
    def decoder(self) -> "_StandIn":
        """Returns the stand-in, since some classes, such as OPT's, call their base's decoder."""
        return self

    def forward(self, *args: object, **kwargs: object) -> Any:
        return self._output_type(last_hidden_state=self.states)
