"""`Head`: what config.json says of the final norm and the output layer. Imports no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.engine.models.parts.tensors import Axis, LinearSpec, Part, VectorSpec, matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Head(Part):
    """is_tied: whether the output layer is the input embedding. multiplier: of the logits.
    softcap: logits are cap * tanh(logit / cap), or as they are."""

    LLAMA = (
        ("is_tied", False, "tied_embeddings"),
        ("multiplier", 1.0, "logit_multiplier"),
        ("softcap", None, "logit_softcap"),
    )

    hidden_size: int
    vocab_size: int
    is_tied: bool = False
    multiplier: float = 1.0
    softcap: float | None = None

    @property
    def linears(self) -> Mapping[str, LinearSpec]:
        """output: to the logits; a tied one has no tensor of its own, and no quantized weights."""
        ids = Axis(self.vocab_size, key="vocab_size", is_padded=True)
        output = matrix("lm_head", ids, Axis(self.hidden_size), "output")
        return {"output": LinearSpec((output,), is_quantizable=not self.is_tied)}

    @property
    def vectors(self) -> Mapping[str, VectorSpec]:
        hidden, gguf = (Axis(self.hidden_size),), "output_norm.weight"
        return {"norm": VectorSpec("model.norm.weight", hidden, gguf=gguf, is_norm=True)}

    def divided(self, num_ranks: int) -> "Head":
        return replace(self, vocab_size=-(-self.vocab_size // num_ranks))
