"""Attention to latents in torch, with keys and values that are absorbed: see `LatentAttention`."""

import torch
from torch import Tensor

from penstock.engine.kernels.attention.gathered import gathered_attention
from penstock.engine.memory.pool.kv_codes import KVPages, store
from penstock.engine.models.layers.linear import Linear, PlainLinear
from penstock.engine.models.parts.adapter import adapted
from penstock.engine.models.parts.attention.rotary import Angles, rotate
from penstock.engine.models.parts.latent_attention.config import LatentAttention
from penstock.engine.models.parts.norm.layer import rms_norm
from penstock.engine.models.parts.reader import PartLayer, PartReader
from penstock.engine.models.parts.tensors import Stack
from penstock.engine.step.model_input import ModelInput


class LatentAttentionLayer(PartLayer[LatentAttention]):
    """qkv is stacked, so that it is one matrix product. expansion: its weight is computed with as
    it is, and plain."""

    qkv: Linear
    query: Linear
    expansion: Linear
    output: Linear
    query_norm: Tensor | None = None
    latent_norm: Tensor

    def __init__(self, config: LatentAttention, reader: PartReader) -> None:
        super().__init__(config, reader)
        self.expansion = _plain(self.expansion, config.latent_dim, self.latent_norm)

    def __call__(
        self,
        x: Tensor,
        index: int,
        angles: Angles,
        keys: KVPages,
        values: KVPages,
        step: ModelInput,
    ) -> Tensor:
        """Returns its output for x, (T, hidden_size), on this rank. The rest: see
        `AttentionLayer`."""
        config, eps = self.config, self.config.norm_eps
        projected = adapted(self.qkv, x, step.adapters, index, Stack.QKV)
        query, latent, shared = torch.split(projected, config.qkv_sizes, dim=1)
        if self.query_norm is not None:
            query = self.query(rms_norm(query, self.query_norm, eps))
        latent = rms_norm(latent, self.latent_norm, eps)
        key = torch.cat((latent.unsqueeze(1), self._rotated(shared.unsqueeze(1), angles)), dim=2)
        store(keys, step.kv_slots, key)
        attended = gathered_attention(self._absorbed(query, angles), keys, values, step, None)
        _, to_values = self.expansions
        given = torch.bmm(attended.transpose(0, 1), to_values.transpose(1, 2))
        flat = given.transpose(0, 1).flatten(1)
        return adapted(self.output, flat, step.adapters, index, Stack.OUTPUT)

    def _absorbed(self, projected: Tensor, angles: Angles) -> Tensor:
        """Queries as latents are multiplied with them: (T, num_heads, head_dim)."""
        config = self.config
        heads = projected.view(len(projected), config.num_heads, config.query_dim)
        plain, rotated = torch.split(heads, [config.nope_dim, config.rope_dim], dim=2)
        to_keys, _ = self.expansions
        absorbed = torch.bmm(plain.transpose(0, 1), to_keys).transpose(0, 1)
        query = torch.cat((absorbed, self._rotated(rotated, angles)), dim=2)
        assert angles.query_factors is not None, "its scale is not that of its head_dim"
        return (query.float() * angles.query_factors.view(-1, 1, 1)).to(query.dtype)

    def _rotated(self, x: Tensor, angles: Angles) -> Tensor:
        """Rotates x, (T, heads, rope_dim)."""
        if self.config.is_interleaved:
            x = x.view(*x.shape[:2], -1, 2).transpose(2, 3).flatten(2)
        return rotate(x, angles.cos.unsqueeze(1), angles.sin.unsqueeze(1))

    @property
    def expansions(self) -> tuple[Tensor, Tensor]:
        """Views of what would make keys of a latent, and of what makes values: (num_heads,
        nope_dim, latent_dim) and (num_heads, value_dim, latent_dim)."""
        config, expansion = self.config, self.expansion
        assert isinstance(expansion, PlainLinear), expansion
        each = expansion.weight.view(config.num_heads, -1, config.latent_dim)
        return each[:, : config.nope_dim], each[:, config.nope_dim :]


def _plain(linear: Linear, columns: int, like: Tensor) -> PlainLinear:
    """The layer with its weight in the type, and on the device, of another tensor."""
    if isinstance(linear, PlainLinear):
        return linear
    # Each product has one term besides zeros, so that the weight is as it was.
    identity = torch.eye(columns, dtype=like.dtype, device=like.device)
    return PlainLinear(linear(identity).t().contiguous(), None)
