"""`Embedding`: what config.json says of the input embedding. Imports no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.engine.models.parts.tensors import (
    Axis,
    LinearSpec,
    MatrixSpec,
    VectorSpec,
    differences,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """multiplier: of the rows that tokens get."""

    hidden_size: int
    vocab_size: int
    multiplier: float = 1.0

    @property
    def linears(self) -> Mapping[str, LinearSpec]:
        """table: a row for each id, of which a step gathers some."""
        ids = Axis(self.vocab_size, key="vocab_size", is_padded=True)
        matrix = MatrixSpec(
            names=("model.embed_tokens",),
            rows=(ids,),
            columns=Axis(self.hidden_size),
            gguf=("token_embd",),
        )
        return {"table": LinearSpec((matrix,), is_quantizable=False)}

    @property
    def vectors(self) -> Mapping[str, VectorSpec]:
        return {}

    def divided(self, num_ranks: int) -> "Embedding":
        """See `Part`."""
        return replace(self, vocab_size=-(-self.vocab_size // num_ranks))

    @property
    def features(self) -> frozenset[str]:
        """See `Part`."""
        return differences(self, {"multiplier": (1.0, "embedding_multiplier")})
