"""`Embedding`: what config.json says of the input embedding. Imports no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.engine.models.parts.tensors import Axis, LinearSpec, Part, matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding(Part):
    """multiplier: of the rows that tokens get."""

    LLAMA = (("multiplier", 1.0, "embedding_multiplier"),)

    hidden_size: int
    vocab_size: int
    multiplier: float = 1.0

    @property
    def linears(self) -> Mapping[str, LinearSpec]:
        """table: a row for each id, of which a step gathers some."""
        ids = Axis(self.vocab_size, key="vocab_size", is_padded=True)
        table = matrix("model.embed_tokens", ids, Axis(self.hidden_size), "token_embd")
        return {"table": LinearSpec((table,), is_quantizable=False)}

    def divided(self, num_ranks: int) -> "Embedding":
        return replace(self, vocab_size=-(-self.vocab_size // num_ranks))
