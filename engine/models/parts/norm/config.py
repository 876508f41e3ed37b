"""`Norms` and `Scalar`: the norms around a layer's parts, and what its states are multiplied by.
Imports no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.engine.models.parts.tensors import Axis, LinearSpec, VectorSpec, differences


@dataclass(frozen=True, slots=True, kw_only=True)
class NormKind:
    """How all norms of a model are computed. offset: added to the weight, which is then, as where
    is_wide, multiplied in float32."""

    eps: float = 1e-6
    is_wide: bool = False
    offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """pre, post: whether there are norms of what attention and the MLP read, and of what they give
    before it is added."""

    hidden_size: int
    pre: bool = True
    post: bool = False

    @property
    def linears(self) -> Mapping[str, LinearSpec]:
        return {}

    @property
    def vectors(self) -> Mapping[str, VectorSpec]:
        """input, mlp: of what is read. attended, active: of what is given."""
        found: dict[str, VectorSpec] = {}
        # With norms after the layer's parts, the first of these keeps the name of Llama's second.
        mlp = "pre_feedforward_layernorm" if self.post else "post_attention_layernorm"
        if self.pre:
            found["input"] = self._norm("input_layernorm", "attn_norm")
            found["mlp"] = self._norm(mlp, "ffn_norm")
        if self.post:
            found["attended"] = self._norm("post_attention_layernorm")
            found["active"] = self._norm("post_feedforward_layernorm")
        return found

    def _norm(self, name: str, gguf: str | None = None) -> VectorSpec:
        return VectorSpec(
            f"{name}.weight", (Axis(self.hidden_size),), gguf=gguf and f"{gguf}.weight"
        )

    def divided(self, num_ranks: int) -> "Norms":
        """See `Part`."""
        return self

    @property
    def features(self) -> frozenset[str]:
        """See `Part`."""
        return differences(self, {"pre": (True, "no_pre_norms"), "post": (False, "post_norms")})


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number that a layer's states are multiplied by."""

    @property
    def linears(self) -> Mapping[str, LinearSpec]:
        return {}

    @property
    def vectors(self) -> Mapping[str, VectorSpec]:
        return {"scalar": VectorSpec("layer_scalar", (Axis(1),))}

    def divided(self, num_ranks: int) -> "Scalar":
        """See `Part`."""
        return self

    @property
    def features(self) -> frozenset[str]:
        """See `Part`."""
        return frozenset({"layer_scalars"})
