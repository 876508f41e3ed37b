"""The demo model's network: Llama's architecture, written to be trained on one CPU thread.

Its parameter names and its arithmetic are those of transformers' `LlamaForCausalLM`, so a state
dict saved here loads there unchanged. It takes whole rows of token ids: no KV cache, no sampling;
`penstock.engine.models` serves the weights.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """Sizes that suit the kernels: head_dim is a power of two, hidden_size a multiple of 64."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return (wide * scale * self.weight).to(hidden.dtype)


class Attention(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self._head_dim = config.head_dim
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = hidden.shape
        shape = (rows, length, -1, self._head_dim)
        query = rotate(self.q_proj(hidden).view(shape).transpose(1, 2), cos, sin)
        key = rotate(self.k_proj(hidden).view(shape).transpose(1, 2), cos, sin)
        value = self.v_proj(hidden).view(shape).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        output: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))
        return output


class FeedForward(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        gated = functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        output: Tensor = self.down_proj(gated)
        return output


class Layer(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Decoder(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, token_ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden: Tensor = self.embed_tokens(token_ids)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        output: Tensor = self.norm(hidden)
        return output


class Network(nn.Module):
    """Token ids in, logits out. Input and output embeddings are tied."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        # GPT-2's initialisation: additions to the residual stream start small, so that its variance
        # does not grow with depth.
        residual_std = 0.02 / (2 * config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual_std if is_residual else 0.02)

    def forward(self, token_ids: Tensor, wanted: Tensor | None = None) -> Tensor:
        """token_ids: (rows, length) int64. Returns (rows, length, vocab) in the autocast dtype; or
        (T, vocab) after those tokens alone of which wanted, (rows, length), is true."""
        cos, sin = rotary_tables(self.config, token_ids.shape[1])
        hidden = self.model(token_ids, cos, sin)
        hidden = hidden if wanted is None else hidden[wanted]
        return functional.linear(hidden, self.model.embed_tokens.weight)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def rotary_tables(config: NetworkConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position: (length, head_dim), halves repeated as in Llama."""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    angles = torch.outer(torch.arange(length).float(), config.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding on (rows, heads, length, head_dim). Source: arXiv:2104.09864."""
    first, second = heads.chunk(2, dim=-1)
    return (heads * cos + torch.cat((-second, first), dim=-1) * sin).to(heads.dtype)
