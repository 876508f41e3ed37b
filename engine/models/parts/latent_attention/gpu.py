"""Attention to latents on a GPU, with keys and values that are absorbed: see `LatentAttention`."""

from torch import Tensor

from penstock.engine.kernels.attention.protocol import DeviceAttention, LayerContext
from penstock.engine.kernels.norm import rms_norm
from penstock.engine.memory.pool.kv_pool import LayerPools
from penstock.engine.models.layers.fused_linear import fused_linear, product
from penstock.engine.models.parts.attention.rotary import Angles
from penstock.engine.models.parts.latent_attention.kernels.products import head_products
from penstock.engine.models.parts.latent_attention.kernels.tokens import rotate_and_store_latents
from penstock.engine.models.parts.latent_attention.layer import LatentAttentionLayer
from penstock.engine.step.device_step import DeviceStep


class FusedLatentAttention:
    """See `FusedMixer`."""

    def __init__(
        self,
        layer: LatentAttentionLayer,
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
        self.out_shape: tuple[int, ...] = config.num_heads, config.latent_dim
        self._query = fused_linear(layer.query) if config.query_rank else None
        self._layer, self._angles, self._attention = layer, angles, attention
        self._context = LayerContext(*pool.layer(index), config.window)
        to_keys, self._to_values = layer.expansions
        self._to_latents = to_keys.transpose(1, 2)

    def __call__(self, projected: list[Tensor], step: DeviceStep, out: Tensor) -> Tensor:
        """See `FusedMixer`; out has what heads have attended to, of which values are made."""
        [both], layer, config = projected, self._layer, self._layer.config
        num_tokens, (size, *_) = len(both), config.qkv_sizes
        queries = both[:, :size]
        if self._query is not None:
            assert layer.query_norm is not None, config
            normed = both.new_empty(num_tokens, size)
            rms_norm(queries, layer.query_norm, config.norm_eps, normed)
            queries = product(self._query, normed)
        heads = queries.view(num_tokens, config.num_heads, config.query_dim)
        query = both.new_empty(num_tokens, config.num_heads, config.head_dim)
        factors = self._angles.query_factors
        nope = heads[..., : config.nope_dim]
        latents = query[..., : config.latent_dim]
        head_products(nope, self._to_latents, latents, factors, step.positions)
        rotate_and_store_latents(
            config, both[:, size:], heads, layer.latent_norm, self._angles, step,
            self._context.keys, query,
        )  # fmt: skip
        self._attention(query, self._context, step, out)
        values = both.new_empty(num_tokens, config.num_heads, config.value_dim)
        head_products(out, self._to_values, values)
        return values.flatten(1)
