"""`Head`: what config.json says of the final norm and the output layer. Imports no tensors."""

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
class Head:
    """is_tied: whether the output layer is the input embedding. multiplier: of the logits.
    softcap: logits are cap * tanh(logit / cap), or as they are."""

    hidden_size: int
    vocab_size: int
    is_tied: bool = False
    multiplier: float = 1.0
    softcap: float | None = None

    @property
    def linears(self) -> Mapping[str, LinearSpec]:
        """output: to the logits; a tied one has no tensor of its own, and no quantized weights."""
        ids = Axis(self.vocab_size, key="vocab_size", is_padded=True)
        matrix = MatrixSpec(
            names=("lm_head",), rows=(ids,), columns=Axis(self.hidden_size), gguf=("output",)
        )
        return {"output": LinearSpec((matrix,), is_quantizable=not self.is_tied)}

    @property
    def vectors(self) -> Mapping[str, VectorSpec]:
        name = "model.norm.weight"
        return {"norm": VectorSpec(name, (Axis(self.hidden_size),), gguf="output_norm.weight")}

    def divided(self, num_ranks: int) -> "Head":
        """See `Part`."""
        return replace(self, vocab_size=-(-self.vocab_size // num_ranks))

    @property
    def features(self) -> frozenset[str]:
        """See `Part`."""
        return differences(self, _NEUTRAL)


_NEUTRAL = {
    "is_tied": (False, "tied_embeddings"),
    "multiplier": (1.0, "logit_multiplier"),
    "softcap": (None, "logit_softcap"),
}
