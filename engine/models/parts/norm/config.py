"""`Norms`: the norms around a layer's parts. Imports no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.engine.models.parts.tensors import Axis, Part, VectorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms(Part):
    """pre, post: whether there are norms of what attention and the MLP read, and of what they give
    before it is added. has_scalar: whether the layer's states are multiplied by a number."""

    LLAMA = (
        ("pre", True, "no_pre_norms"),
        ("post", False, "post_norms"),
        ("has_scalar", False, "layer_scalars"),
    )

    hidden_size: int
    pre: bool = True
    post: bool = False
    has_scalar: bool = False

    @property
    def vectors(self) -> Mapping[str, VectorSpec]:
        """input_norm, mlp_norm: of what is read. attended_norm, active_norm: of what is given."""
        found: dict[str, VectorSpec] = {}
        # With norms after the layer's parts, the first of these keeps the name of Llama's second.
        mlp = "pre_feedforward_layernorm" if self.post else "post_attention_layernorm"
        if self.pre:
            found["input_norm"] = self._norm("input_layernorm", "attn_norm")
            found["mlp_norm"] = self._norm(mlp, "ffn_norm")
        if self.post:
            found["attended_norm"] = self._norm("post_attention_layernorm", "post_attention_norm")
            found["active_norm"] = self._norm("post_feedforward_layernorm", "post_ffw_norm")
        if self.has_scalar:
            scale, one = "layer_output_scale.weight", (Axis(1),)
            found["scalar"] = VectorSpec("layer_scalar", one, gguf=scale, is_wide=False)
        return found

    def _norm(self, name: str, gguf: str) -> VectorSpec:
        hidden = (Axis(self.hidden_size),)
        return VectorSpec(f"{name}.weight", hidden, gguf=f"{gguf}.weight", is_norm=True)
