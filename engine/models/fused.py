"""`FusedModel`: the layers of `LlamaModel` on a GPU, with few kernel launches.

A layer is computed in one of two ways. With few tokens (`skinny_linear`): five launches, each
matrix product fused with what surrounds it, since at batch 1 launches cost as much as reading the
weights. With more tokens: cuBLAS for the products, and one kernel for everything between two of
them. In both, a step of decodes alone leaves the rotation to an attention that does it itself.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.attention.protocol import DeviceAttention, RotatingAttention
from penstock.engine.device_step import DeviceStep, Rotation
from penstock.engine.kernels.activation import silu_mul
from penstock.engine.kernels.linear import MAX_ROWS
from penstock.engine.kernels.norm import add_rms_norm, embed, rms_norm
from penstock.engine.kernels.rope import rotate_and_store
from penstock.engine.memory.kv_pool import KVPool
from penstock.engine.models.fused_linear import FUSED_LINEARS, FUSED_PATH, FusedLinear
from penstock.engine.models.llama import Layer, LlamaModel

# Of ModelConfig.
_FEATURES = {"tied_embeddings", "qkv_bias", "output_bias", "mlp_bias", "qk_norm"}


class _Linears(NamedTuple):
    """One layer's."""

    qkv: FusedLinear
    output: FusedLinear
    gate_up: FusedLinear
    down: FusedLinear


class FusedModel:
    """Owns no weights: it computes with those of a `LlamaModel`."""

    def __init__(
        self, model: LlamaModel, pool: KVPool, attention: DeviceAttention, max_rows: int
    ) -> None:
        """max_rows: the most that sample in one step.

        Raises UnsupportedFeature or UnsupportedWeightFormat.
        """
        model.config.check_features(FUSED_PATH, _FEATURES)
        self._model = model
        self._pool = pool
        self._attention = attention
        self._linears = [
            _Linears(*map(FUSED_LINEARS.of, (layer.qkv, layer.output, layer.gate_up, layer.down)))
            for layer in model.layers
        ]
        self._lm_head = FUSED_LINEARS.of(model.lm_head)
        # One buffer for the logits of all steps: a buffer for each graph would take gigabytes.
        vocab_size, embedding = model.config.vocab_size, model.embedding
        self._logits = embedding.new_empty(max_rows, vocab_size)
        self._few_logits = embedding.new_empty(MAX_ROWS, vocab_size, dtype=torch.float32)

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph may hold a step."""
        return self._attention.is_capturable

    @property
    def takes_decode_lens(self) -> bool:
        """Whether it computes a step with `DeviceStep.decode_lens`."""
        return self._attention.takes_decode_lens

    def __call__(self, step: DeviceStep) -> Tensor:
        """The last layer's states before the final norm, (T, hidden). Writes keys and values."""
        model, config = self._model, self._model.config
        num_tokens = len(step.token_ids)
        self._attention.plan(step)
        residual = model.embedding.new_empty(num_tokens, config.hidden_size)
        mixed = self._mixed(step, residual)
        embed(step.token_ids, model.embedding, residual)
        run = self._few_tokens if num_tokens <= MAX_ROWS else self._many_tokens
        run(step, residual, mixed)
        return residual

    def logits(self, states: Tensor) -> Tensor:
        """Of some rows of what a call returned: (S, vocab_size), float32 or the model's type.

        Valid until the next call.
        """
        model, eps, num_rows = self._model, self._model.config.rms_norm_eps, len(states)
        if num_rows <= MAX_ROWS:
            out = self._few_logits[:num_rows]
            self._lm_head.few(states, out, norm=model.norm, eps=eps)
            return out
        return self._lm_head.many(self.normed(states), self._logits[:num_rows])

    def logits_of_normed(self, states: Tensor) -> Tensor:
        """Of states after the final norm: (S, vocab_size) float32."""
        return self._lm_head.many(states).float()

    def normed(self, states: Tensor) -> Tensor:
        """After the final norm."""
        normed = torch.empty_like(states)
        rms_norm(states, self._model.norm, self._model.config.rms_norm_eps, normed)
        return normed

    def _mixed(self, step: DeviceStep, residual: Tensor) -> Tensor:
        """What every layer's attention writes to: (T, num_heads, head_dim).

        Tokens that only pad a graph belong to no row, so attention writes nothing for them, and
        they stay zeros. One buffer for all layers: zeroed in each, it would be an operation between
        two kernels that may overlap.
        """
        config = self._model.config
        shape = (len(residual), config.num_heads, config.head_dim)
        return residual.new_empty(shape) if step.decode_lens is None else residual.new_zeros(shape)

    def _few_tokens(self, step: DeviceStep, residual: Tensor, mixed: Tensor) -> None:
        config = self._model.config
        eps = config.rms_norm_eps
        active = residual.new_empty(len(residual), config.intermediate_size)
        flat = mixed.flatten(1)
        layers = zip(self._model.layers, self._linears, strict=True)
        for index, (layer, linears) in enumerate(layers):
            projected = residual.new_empty(len(residual), linears.qkv.out_features)
            linears.qkv.few(residual, projected, norm=layer.input_norm, eps=eps)
            self._attend(index, layer, projected, step, mixed)
            linears.output.few(flat, residual, residual=residual)
            linears.gate_up.few_gated(residual, active, norm=layer.mlp_norm, eps=eps)
            linears.down.few(active, residual, residual=residual)

    def _many_tokens(self, step: DeviceStep, residual: Tensor, mixed: Tensor) -> None:
        model, eps = self._model, self._model.config.rms_norm_eps
        normed = torch.empty_like(residual)
        active = residual.new_empty(len(residual), model.config.intermediate_size)
        flat = mixed.flatten(1)
        rms_norm(residual, model.layers[0].input_norm, eps, normed)
        for index, (layer, linears) in enumerate(zip(model.layers, self._linears, strict=True)):
            self._attend(index, layer, linears.qkv.many(normed), step, mixed)
            add_rms_norm(linears.output.many(flat), residual, layer.mlp_norm, eps, normed)
            silu_mul(linears.gate_up.many(normed), active)
            change = linears.down.many(active)
            if index + 1 < len(model.layers):
                add_rms_norm(change, residual, model.layers[index + 1].input_norm, eps, normed)
            else:
                residual += change

    def _attend(
        self, index: int, layer: Layer, projected: Tensor, step: DeviceStep, mixed: Tensor
    ) -> None:
        """Writes attention's output before the output layer to `mixed`."""
        model = self._model
        keys, values = self._pool.layer(index)
        rotation = Rotation(
            cos=model.cos,
            sin=model.sin,
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            eps=model.config.rms_norm_eps,
        )
        if step.chunk_starts is None and isinstance(self._attention, RotatingAttention):
            self._attention.rotated(projected, rotation, keys, values, step, layer.window, mixed)
            return
        query = torch.empty_like(mixed)
        rotate_and_store(
            projected,
            step.positions,
            step.kv_slots,
            rotation.cos,
            rotation.sin,
            rotation.query_norm,
            rotation.key_norm,
            rotation.eps,
            keys,
            values,
            query,
        )
        self._attention(query, keys, values, step, layer.window, mixed)
