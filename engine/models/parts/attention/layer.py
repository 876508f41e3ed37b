"""Attention over a paged KV cache in torch."""

import torch
from torch import Tensor

from penstock.engine.kernels.attention.gathered import gathered_attention
from penstock.engine.memory.pool.kv_codes import KVPages, store
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.parts.adapter import adapted
from penstock.engine.models.parts.attention.config import Attention
from penstock.engine.models.parts.attention.rotary import Angles, rotate
from penstock.engine.models.parts.norm.layer import normed, unit_norm
from penstock.engine.models.parts.reader import PartLayer, summed
from penstock.engine.models.parts.tensors import Stack
from penstock.engine.step.model_input import ModelInput


class AttentionLayer(PartLayer[Attention]):
    """qkv is stacked, so that it is one matrix product. sinks: see `gathered_attention`. group:
    of ranks that have other heads."""

    qkv: Linear
    output: Linear
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    sinks: Tensor | None = None

    def __call__(
        self,
        x: Tensor,
        index: int,
        angles: Angles,
        keys: KVPages,
        values: KVPages,
        step: ModelInput,
    ) -> Tensor:
        """Returns its output for x, (T, hidden_size), on this rank.

        index: which layer it is. angles: of the step's positions. keys, values: the layer's own
        part of the pool; the step's are written to them, unless it reads another layer's.
        """
        config = self.config
        projected = adapted(self.qkv, x, step.adapters, index, Stack.QKV)
        query, *own = torch.split(projected, config.qkv_sizes, dim=1)
        gate = None
        if config.has_gates:
            query, gate = query.view(len(x), config.num_heads, -1).chunk(2, dim=-1)
            query = query.flatten(1)
        if config.norms_whole:
            query, own[0] = normed_whole(self, query, own[0])
        if own:
            value = own[-1].view(len(x), -1, config.head_dim)
            if config.norms_values:
                value = unit_norm(value, self.eps)
            store(keys, step.kv_slots, self._heads(own[0], self.key_norm, angles))
            store(values, step.kv_slots, value)
        query = self._heads(query, self.query_norm, angles)
        if angles.query_factors is not None:
            query = (query.float() * angles.query_factors.view(-1, 1, 1)).to(query.dtype)
        reaches = step.reaches if config.has_spans else None
        if reaches is not None and config.is_two_sided and config.window is not None:
            reaches = reaches.minimum(step.positions + config.window)
        mixed = gathered_attention(query, keys, values, step, config.window, self.sinks, reaches)
        if gate is not None:
            mixed = mixed * torch.sigmoid(gate)
        return adapted(self.output, mixed.flatten(1), step.adapters, index, Stack.OUTPUT)

    def _heads(self, projected: Tensor, norm: Tensor | None, angles: Angles) -> Tensor:
        """Queries or keys as they are multiplied."""
        each = projected.view(len(projected), -1, self.config.head_dim)
        if not self.config.norms_whole:
            each = normed(each, norm, self.eps)
        return rotate(each, angles.cos.unsqueeze(1), angles.sin.unsqueeze(1), angles.rotary_dim)


def normed_whole(layer: AttentionLayer, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Each over all heads, those of other ranks too."""
    eps = layer.eps
    if layer.group is None:
        return normed(query, layer.query_norm, eps), normed(key, layer.key_norm, eps)
    means = torch.stack([each.float().square().mean(-1) for each in (query, key)])
    assert layer.query_norm is not None and layer.key_norm is not None, "norms_whole has both"
    # Every rank has as many heads, and a head that several have counts equally often as another.
    of_all = summed(layer.group, means) / layer.group.size
    factors = (of_all + eps).rsqrt().unsqueeze(-1)
    norms = (layer.query_norm, layer.key_norm)
    query, key = (
        (each.float() * factor * weight).to(each.dtype)
        for each, factor, weight in zip((query, key), factors, norms, strict=True)
    )
    return query, key
