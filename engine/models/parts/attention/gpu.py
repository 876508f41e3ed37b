"""Attention on a GPU: what comes between its two products."""

from dataclasses import replace

import torch
from torch import Tensor

from penstock.engine.kernels.activation import apply_gates, without_gates
from penstock.engine.kernels.attention.protocol import (
    DeviceAttention,
    LayerContext,
    RotatingAttention,
)
from penstock.engine.kernels.norm import rms_norm
from penstock.engine.kernels.rope import rotate_and_store
from penstock.engine.memory.pool.kv_pool import LayerPools
from penstock.engine.models.layers.fused_linear import fused_linear
from penstock.engine.models.parts.attention.layer import AttentionLayer, normed_whole
from penstock.engine.models.parts.attention.rotary import Angles
from penstock.engine.step.device_step import DeviceStep, Rotation


class FusedAttention:
    """See `FusedMixer`."""

    def __init__(
        self,
        layer: AttentionLayer,
        pool: LayerPools,
        index: int,
        angles: Angles | None,
        attention: DeviceAttention,
    ) -> None:
        """Raises UnsupportedWeightFormat."""
        config = layer.config
        assert angles is not None, config
        self.projections = [fused_linear(layer.qkv)]
        self.output = fused_linear(layer.output)
        self.out_shape: tuple[int, ...] = config.num_heads, config.head_dim
        self._layer, self._attention = layer, attention
        self._context = LayerContext(
            *pool.layer(index), config.window, layer.sinks, config.has_spans
        )
        self._rotation = Rotation(
            cos=angles.cos,
            sin=angles.sin,
            query_norm=None if config.norms_whole else layer.query_norm,
            key_norm=None if config.norms_whole else layer.key_norm,
            eps=layer.eps,
            query_factors=angles.query_factors,
            rotary_dim=angles.rotary_dim,
            kv_parts=config.num_kv_parts,
            norms_values=config.norms_values,
        )

    def __call__(self, projected: list[Tensor], step: DeviceStep, out: Tensor) -> Tensor:
        """See `FusedMixer`."""
        [heads], config = projected, self._layer.config
        ungated = heads
        if config.has_gates:
            ungated = without_gates(heads, config.num_heads, config.head_dim)
        self._attend(ungated, step, out)
        if config.has_gates:
            apply_gates(heads, out)
        return out.flatten(1)

    def _attend(self, projected: Tensor, step: DeviceStep, out: Tensor) -> None:
        attention, context, rotation = self._attention, self._context, self._rotation
        if step.angles is not None:
            rotation = replace(rotation, cos=step.angles[0], sin=step.angles[1])
        if self._layer.config.norms_whole:
            self._norm_whole(projected)
        is_single = step.chunk_starts is None and step.queries is None
        if is_single and isinstance(attention, RotatingAttention):
            attention.rotated(projected, rotation, context, step, out)
            return
        query, pages = torch.empty_like(out), (context.keys, context.values)
        rotate_and_store(projected, rotation, step.rotations, step.kv_slots, *pages, query)
        attention(query, context, step, out)

    def _norm_whole(self, projected: Tensor) -> None:
        """In place, queries and keys each over all heads."""
        layer = self._layer
        query_norm, key_norm = layer.query_norm, layer.key_norm
        assert query_norm is not None and key_norm is not None, "norms_whole has both"
        sizes = [len(query_norm), len(key_norm)]
        query, key = torch.split(projected[:, : sum(sizes)], sizes, dim=1)
        if layer.group is None:
            for weight, columns in ((query_norm, query), (key_norm, key)):
                rms_norm(columns, weight, layer.eps, columns)
            return
        for columns, normed in zip((query, key), normed_whole(layer, query, key), strict=True):
            columns.copy_(normed)
