"""`Embedding` and `Head`: what config.json says of the input embedding, and of the output layer and
the norm before it. Imports no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from penstock.engine.models.parts.tensors import (
    Axis,
    LinearSpec,
    MatrixSpec,
    Part,
    VectorSpec,
    matrix,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary(Part):
    """A part with a row for each id."""

    hidden_size: int
    vocab_size: int

    def _matrix(self, name: str, gguf: str) -> MatrixSpec:
        ids = Axis(self.vocab_size, key="vocab_size", is_padded=True)
        return matrix(name, ids, Axis(self.hidden_size), gguf)

    def divided(self, num_ranks: int) -> Self:
        return replace(self, vocab_size=-(-self.vocab_size // num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding(_Vocabulary):
    """multiplier: of the rows that tokens get. num_positions, num_types: of rows that are added to
    these by a token's position, from first_position on, and by its segment of a prompt, as BERT
    has them; 0 without. has_norm: of the sum, centred; has_norm_bias: of that."""

    LLAMA = (
        ("multiplier", 1.0, "embedding_multiplier"),
        ("num_positions", 0, "absolute_positions"),
        ("num_types", 0, "token_types"),
        ("has_norm", False, "embedding_norm"),
    )

    multiplier: float = 1.0
    num_positions: int = 0
    first_position: int = 0
    num_types: int = 0
    has_norm: bool = False
    has_norm_bias: bool = False

    @property
    def linears(self) -> Mapping[str, LinearSpec]:
        """table: a row for each id, of which a step gathers some. positions, types: likewise."""
        table = self._matrix("model.embed_tokens", "token_embd")
        tables = {"table": table}
        hidden = Axis(self.hidden_size)
        if self.num_positions:
            rows = Axis(self.num_positions)
            tables["positions"] = matrix("model.embed_positions", rows, hidden, "position_embd")
        if self.num_types:
            tables["types"] = matrix(
                "model.embed_types", Axis(self.num_types), hidden, "token_types"
            )
        return {name: LinearSpec((each,), is_quantizable=False) for name, each in tables.items()}

    @property
    def vectors(self) -> Mapping[str, VectorSpec]:
        """norm: of what is embedded, where there is one."""
        if not self.has_norm:
            return {}
        hidden, gguf = (Axis(self.hidden_size),), "token_embd_norm.weight"
        name, has_bias = "model.embed_norm.weight", self.has_norm_bias
        return {"norm": VectorSpec(name, hidden, gguf=gguf, is_norm=True, has_bias=has_bias)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Head(_Vocabulary):
    """is_tied: whether the output layer is the input embedding. multiplier: of the logits.
    softcap: logits are cap * tanh(logit / cap), or as they are. has_norm: before it;
    has_norm_bias: of that."""

    LLAMA = (
        ("is_tied", False, "tied_embeddings"),
        ("multiplier", 1.0, "logit_multiplier"),
        ("softcap", None, "logit_softcap"),
        ("has_norm", True, "no_final_norm"),
    )

    is_tied: bool = False
    multiplier: float = 1.0
    softcap: float | None = None
    has_norm: bool = True
    has_norm_bias: bool = False

    @property
    def linears(self) -> Mapping[str, LinearSpec]:
        """output: to the logits; a tied one has no tensor of its own, and no quantized weights."""
        output = self._matrix("lm_head", "output")
        return {"output": LinearSpec((output,), is_quantizable=not self.is_tied)}

    @property
    def vectors(self) -> Mapping[str, VectorSpec]:
        if not self.has_norm:
            return {}
        hidden, gguf = (Axis(self.hidden_size),), "output_norm.weight"
        name, has_bias = "model.norm.weight", self.has_norm_bias
        return {"norm": VectorSpec(name, hidden, gguf=gguf, is_norm=True, has_bias=has_bias)}
