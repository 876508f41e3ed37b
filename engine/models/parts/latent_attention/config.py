"""`LatentAttention`: what config.json says of attention to latents. Imports no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from penstock.engine.files.json_file import Fields
from penstock.engine.memory.pool.kv_shape import KVHeads
from penstock.engine.models.parts.attention.rope import RopeConfig, RopeSettings
from penstock.engine.models.parts.tensors import (
    Axis,
    LinearSpec,
    Part,
    Stack,
    VectorSpec,
    matrix,
)

# Far more than any model has.
_MAX_HEADS, _MAX_DIM = 2**12, 2**14


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(Part):
    """Each token has a latent, and each head's keys and values are products of it; beside these a
    key has rope_dim numbers with rotary positions, which all heads share. Only both are stored:
    latent_dim + rope_dim numbers of a token, whatever the number of heads.

    So heads attend to latents. A head's query is multiplied by the matrix that would make its keys,
    and what it has attended to by the one that makes values: its scores and its values are the
    same. Then there is one KV head, whose values are the first latent_dim numbers of its keys.

    nope_dim: of a head's queries and keys without rotary positions. value_dim: of its values.
    query_rank: queries are a product of so many numbers, which are normalised; 0 where they are one
    of the states. has_biases: of what reads the states, and of the output. rope, query_scaling: as
    of `Attention`. scale: of scores. is_interleaved: whether a number and the next one are rotated
    together, or it and the one half of rope_dim behind it.

    Source: DeepSeek-AI 2024, DeepSeek-V2, section 2.1 (arXiv:2405.04434).
    """

    LLAMA = (
        ("latent_dim", 0, "latent_attention"),
        ("query_rank", 0, "query_rank"),
        ("query_scaling", None, "query_scaling"),
        ("has_biases", False, "qkv_bias"),
    )
    # As of `Attention`.
    window: ClassVar[None] = None
    num_kv_heads: ClassVar[int] = 1
    has_keys: ClassVar[bool] = True
    has_sinks: ClassVar[bool] = False
    norms_whole: ClassVar[bool] = False
    norms_values: ClassVar[bool] = False
    # Of its own norms, whatever the model's is.
    norm_eps: ClassVar[float] = 1e-6

    hidden_size: int
    num_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    rope: RopeConfig
    scale: float
    query_rank: int = 0
    query_scaling: tuple[float, int] | None = None
    is_interleaved: bool = True
    has_biases: bool = False

    @property
    def head_dim(self) -> int:
        """Of the keys, as they are stored."""
        return self.latent_dim + self.rope_dim

    @property
    def heads(self) -> KVHeads:
        return KVHeads(self.num_kv_heads, self.head_dim, self.latent_dim)

    @property
    def rotary_dim(self) -> int:
        return self.rope_dim

    @property
    def angles_dim(self) -> int:
        """See `RotatedHeads`."""
        return self.rope_dim

    @property
    def query_dim(self) -> int:
        """Of a head's query, as the checkpoint's matrices give it."""
        return self.nope_dim + self.rope_dim

    @property
    def qkv_sizes(self) -> list[int]:
        """The rows of queries, or of what they are a product of, of the latent and of the key that
        heads share."""
        queries = self.query_rank or self.num_heads * self.query_dim
        return [queries, self.latent_dim, self.rope_dim]

    @property
    def linears(self) -> Mapping[str, LinearSpec]:
        """qkv: reads the states, and gives what `qkv_sizes` says. query: gives queries, where there
        is a query_rank. expansion: would give keys and values of a latent, head after head. output:
        back to the states."""
        hidden, values = Axis(self.hidden_size), self._heads(self.value_dim)
        queries = self._heads(self.query_dim)
        name, rows, gguf = ("q_a", Axis(self.query_rank), "attn_q_a")
        if not self.query_rank:
            name, rows, gguf = ("q", queries, "attn_q")
        latent = matrix(
            "self_attn.kv_a_proj_with_mqa", Axis(self.head_dim), hidden, "attn_kv_a_mqa"
        )
        qkv = matrix(f"self_attn.{name}_proj", rows, hidden, gguf), latent
        found = {"qkv": LinearSpec(qkv, self.has_biases, adapters=Stack.QKV)}
        if self.query_rank:
            query = matrix("self_attn.q_b_proj", queries, Axis(self.query_rank), "attn_q_b")
            found["query"] = LinearSpec((query,))
        both, latents = self._heads(self.nope_dim + self.value_dim), Axis(self.latent_dim)
        expansion = matrix("self_attn.kv_b_proj", both, latents, "attn_kv_b")
        found["expansion"] = LinearSpec((expansion,), is_widened=True)
        output = matrix("self_attn.o_proj", hidden, values, "attn_output")
        found["output"] = LinearSpec((output,), self.has_biases, adapters=Stack.OUTPUT)
        return found

    @property
    def vectors(self) -> Mapping[str, VectorSpec]:
        """latent_norm; query_norm, where there is a query_rank."""
        found = {"latent_norm": _norm("kv", self.latent_dim)}
        if self.query_rank:
            found["query_norm"] = _norm("q", self.query_rank)
        return found

    def _heads(self, width: int) -> Axis:
        return Axis(self.num_heads, width, "num_attention_heads")

    def divided(self, num_ranks: int) -> "LatentAttention":
        return replace(self, num_heads=self._heads(1).num_own(num_ranks))


def _norm(name: str, size: int) -> VectorSpec:
    stored, gguf = f"self_attn.{name}_a_layernorm.weight", f"attn_{name}_a_norm.weight"
    return VectorSpec(stored, (Axis(size),), gguf=gguf, is_norm=True)


def read_latent_attention(fields: Fields) -> LatentAttention:
    """Raises InvalidModel."""
    num_heads = fields.count("num_attention_heads", most=_MAX_HEADS)
    if (given := fields.count("num_key_value_heads", default=num_heads)) != num_heads:
        raise fields.wrong("num_key_value_heads", f"num_attention_heads ({num_heads})", given)
    nope_dim = fields.count("qk_nope_head_dim", most=_MAX_DIM)
    rope_dim = fields.count("qk_rope_head_dim", most=_MAX_DIM)
    query_rank = fields.count("q_lora_rank", default=0, least=0, most=_MAX_DIM)
    has_biases = fields.flag("attention_bias")
    if has_biases and not query_rank:  # transformers gives one to the latent, and none to queries
        raise fields.wrong("attention_bias", "false where q_lora_rank is null", has_biases)
    settings = RopeSettings(fields)
    return LatentAttention(
        hidden_size=fields.count("hidden_size"),
        num_heads=num_heads,
        latent_dim=fields.count("kv_lora_rank", most=_MAX_DIM),
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        value_dim=fields.count("v_head_dim", most=_MAX_DIM),
        rope=settings.for_all_layers(rope_dim),
        scale=(nope_dim + rope_dim) ** -0.5 * settings.score_factor(),
        query_rank=query_rank,
        query_scaling=settings.query_scaling(),
        is_interleaved=fields.flag("rope_interleave", default=True),
        has_biases=has_biases,
    )
