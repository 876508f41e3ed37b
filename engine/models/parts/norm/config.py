"""`Norms`: the norms around a layer's parts. Imports no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.engine.models.parts.tensors import Axis, Part, VectorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms(Part):
    """pre, post: whether there are norms of what attention and the MLP read, and of what they give
    before it is added. of_sums: whether there are norms of the states after it was added, as BERT
    has them. has_input: with pre, whether what attention reads has one. has_bias: of all of them,
    which are centred then. has_scalar: whether the layer's states are multiplied by a number."""

    LLAMA = (
        ("pre", True, "no_pre_norms"),
        ("post", False, "post_norms"),
        ("of_sums", False, "norms_of_sums"),
        ("has_input", True, "a_layer_without_input_norm"),
        ("has_bias", False, "norm_biases"),
        ("has_scalar", False, "layer_scalars"),
    )

    hidden_size: int
    pre: bool = True
    post: bool = False
    of_sums: bool = False
    has_input: bool = True
    has_bias: bool = False
    has_scalar: bool = False

    @property
    def vectors(self) -> Mapping[str, VectorSpec]:
        """input_norm, mlp_norm: of what is read. attended_norm, active_norm: of what is given.
        attended_sum_norm, active_sum_norm: of sums."""
        found: dict[str, VectorSpec] = {}
        # With norms after the layer's parts, the first of these keeps the name of Llama's second.
        mlp = "pre_feedforward_layernorm" if self.post else "post_attention_layernorm"
        if self.pre:
            if self.has_input:
                found["input_norm"] = self._norm("input_layernorm", "attn_norm")
            found["mlp_norm"] = self._norm(mlp, "ffn_norm")
        if self.post:
            found["attended_norm"] = self._norm("post_attention_layernorm", "post_attention_norm")
            found["active_norm"] = self._norm("post_feedforward_layernorm", "post_ffw_norm")
        if self.of_sums:
            found["attended_sum_norm"] = self._norm("post_attention_layernorm", "attn_output_norm")
            found["active_sum_norm"] = self._norm("output_layernorm", "layer_output_norm")
        if self.has_scalar:
            scale, one = "layer_output_scale.weight", (Axis(1),)
            found["scalar"] = VectorSpec("layer_scalar", one, gguf=scale, is_wide=False)
        return found

    def _norm(self, name: str, gguf: str) -> VectorSpec:
        hidden = (Axis(self.hidden_size),)
        return VectorSpec(
            f"{name}.weight",
            hidden,
            gguf=f"{gguf}.weight",
            is_norm=True,
            has_bias=self.has_bias,
        )
