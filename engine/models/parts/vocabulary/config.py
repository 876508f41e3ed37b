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
    """multiplier: of the rows that tokens get."""

    LLAMA = (("multiplier", 1.0, "embedding_multiplier"),)

    multiplier: float = 1.0

    @property
    def linears(self) -> Mapping[str, LinearSpec]:
        """table: a row for each id, of which a step gathers some."""
        table = self._matrix("model.embed_tokens", "token_embd")
        return {"table": LinearSpec((table,), is_quantizable=False)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Head(_Vocabulary):
    """is_tied: whether the output layer is the input embedding. multiplier: of the logits.
    softcap: logits are cap * tanh(logit / cap), or as they are."""

    LLAMA = (
        ("is_tied", False, "tied_embeddings"),
        ("multiplier", 1.0, "logit_multiplier"),
        ("softcap", None, "logit_softcap"),
    )

    is_tied: bool = False
    multiplier: float = 1.0
    softcap: float | None = None

    @property
    def linears(self) -> Mapping[str, LinearSpec]:
        """output: to the logits; a tied one has no tensor of its own, and no quantized weights."""
        output = self._matrix("lm_head", "output")
        return {"output": LinearSpec((output,), is_quantizable=not self.is_tied)}

    @property
    def vectors(self) -> Mapping[str, VectorSpec]:
        hidden, gguf = (Axis(self.hidden_size),), "output_norm.weight"
        return {"norm": VectorSpec("model.norm.weight", hidden, gguf=gguf, is_norm=True)}
