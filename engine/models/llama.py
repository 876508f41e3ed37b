"""Llama, Mistral, Qwen2 and Qwen3: one architecture, whose families differ by flags of ModelConfig.

All tokens of a step are one (T, hidden_size) tensor, whichever sequences they belong to; only
attention distinguishes them. The output layer gets only the rows that sample, and those of prompts
whose logprobs were requested.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.attention.protocol import Attention
from penstock.engine.memory.kv_codes import KVPages, store
from penstock.engine.memory.kv_pool import KVPool
from penstock.engine.model_input import ModelInput
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.layers.linear import Linear, MakeLinear, read_linear, tensor_bytes
from penstock.engine.models.layers.rotary import rotary_table, rotate
from penstock.engine.models.weights import WeightSource


class Model(Protocol):
    """What an executor needs of a model. A step is run once, by one of the first two."""

    def __call__(self, step: ModelInput, pool: KVPool) -> Tensor:
        """Logits of the rows that sample: (S, vocab_size) float32. Writes keys and values."""
        ...

    def states(self, step: ModelInput, pool: KVPool, rows: Tensor) -> Tensor:
        """The last layer's states after the final norm, of some of the T tokens: (R, hidden_size).

        rows: (R,) int64, which tokens, in any order. Writes keys and values.
        """
        ...

    def logits(self, states: Tensor) -> Tensor:
        """The logits of such states: (R, hidden_size) to (R, vocab_size) float32."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's weights; qkv and gate_up are stacked, so that each is one matrix product."""

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int | None

    @property
    def num_bytes(self) -> int:
        linears = (self.qkv, self.output, self.gate_up, self.down)
        norms = (self.input_norm, self.query_norm, self.key_norm, self.mlp_norm)
        return sum(linear.num_bytes for linear in linears) + tensor_bytes(*norms)


class LlamaModel:
    """See `Model`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        make_linear: MakeLinear,
        attention: Attention,
        *,
        max_model_len: int,
        device: torch.device,
        num_load_threads: int = 1,
    ) -> None:
        self.config = config
        self._attention = attention
        hidden, vocab = config.hidden_size, config.vocab_size
        with ThreadPoolExecutor(num_load_threads) as pool:
            self.embedding = weights.read((vocab, hidden), "model.embed_tokens.weight")
            layers = pool.map(
                lambda index: read_layer(config, weights, make_linear, index),
                range(config.num_layers),
            )
            self.layers = list(layers)
        self.norm = weights.read((hidden,), "model.norm.weight")
        # An output layer that is packed and tied to the embedding is in memory twice: the gather of
        # input rows needs the plain matrix.
        self.lm_head = (
            weights.quantized((vocab, hidden), None, "lm_head") or make_linear(self.embedding, None)
            if config.tied_embeddings
            else read_linear(weights, make_linear, vocab, hidden, "lm_head")
        )
        layer_bytes = sum(layer.num_bytes for layer in self.layers)
        # As `ModelInfo.weight_bytes`: only the output layer reads a tied embedding.
        self.step_weight_bytes = layer_bytes + self.norm.nbytes + self.lm_head.num_bytes
        self.cos, self.sin = rotary_table(config.rope, config.head_dim, max_model_len, device)

    def __call__(self, step: ModelInput, pool: KVPool) -> Tensor:
        return self.logits(self.states(step, pool, step.sample_rows))

    def logits(self, states: Tensor) -> Tensor:
        return self.lm_head(states).float()

    def states(self, step: ModelInput, pool: KVPool, rows: Tensor) -> Tensor:
        eps = self.config.rms_norm_eps
        cos = self.cos[step.positions].unsqueeze(1)
        sin = self.sin[step.positions].unsqueeze(1)
        residual = functional.embedding(step.token_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            keys, values = pool.layer(index)
            residual = run_layer(
                self.config, layer, self._attention, residual, cos, sin, keys, values, step
            )
        return rms_norm(residual[rows], self.norm, eps)


def run_layer(
    config: ModelConfig,
    layer: Layer,
    attention: Attention,
    residual: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: KVPages,
    values: KVPages,
    step: ModelInput,
) -> Tensor:
    """What a layer makes of the states before it, (T, hidden_size).

    cos, sin: of the step's positions, (T, 1, head_dim / 2). keys, values: the layer's own part of
    the pool; the step's are written to them.
    """
    x = rms_norm(residual, layer.input_norm, config.rms_norm_eps)
    residual = residual + _attend(config, layer, attention, x, cos, sin, keys, values, step)
    x = rms_norm(residual, layer.mlp_norm, config.rms_norm_eps)
    gate, up = layer.gate_up(x).chunk(2, dim=-1)
    return residual + layer.down(functional.silu(gate) * up)


def _attend(
    config: ModelConfig,
    layer: Layer,
    attention: Attention,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: KVPages,
    values: KVPages,
    step: ModelInput,
) -> Tensor:
    heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    projected = layer.qkv(x).view(len(x), -1, config.head_dim)
    query, key, value = torch.split(projected, heads, dim=1)
    if layer.query_norm is not None and layer.key_norm is not None:
        query = rms_norm(query, layer.query_norm, config.rms_norm_eps)
        key = rms_norm(key, layer.key_norm, config.rms_norm_eps)
    store(keys, step.kv_slots, rotate(key, cos, sin))
    store(values, step.kv_slots, value)
    query = rotate(query, cos, sin)
    mixed = attention(query, keys, values, step, layer.window)
    return layer.output(mixed.flatten(1))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


def read_layer(
    config: ModelConfig, weights: WeightSource, make_linear: MakeLinear, index: int
) -> Layer:
    prefix = f"model.layers.{index}."
    hidden, head_dim, mlp = config.hidden_size, config.head_dim, config.intermediate_size
    query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def vector(size: int, name: str) -> Tensor:
        return weights.read((size,), prefix + name)

    def linear(rows: int, columns: int, has_bias: bool, *names: str) -> Linear:
        full_names = (prefix + name for name in names)
        return read_linear(weights, make_linear, rows, columns, *full_names, has_bias=has_bias)

    qkv_names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return Layer(
        input_norm=vector(hidden, "input_layernorm.weight"),
        qkv=linear(query_size + 2 * kv_size, hidden, config.qkv_bias, *qkv_names),
        query_norm=vector(head_dim, "self_attn.q_norm.weight") if config.qk_norm else None,
        key_norm=vector(head_dim, "self_attn.k_norm.weight") if config.qk_norm else None,
        output=linear(hidden, query_size, config.output_bias, "self_attn.o_proj"),
        mlp_norm=vector(hidden, "post_attention_layernorm.weight"),
        gate_up=linear(2 * mlp, hidden, config.mlp_bias, "mlp.gate_proj", "mlp.up_proj"),
        down=linear(hidden, mlp, config.mlp_bias, "mlp.down_proj"),
        window=config.windows[index],
    )
