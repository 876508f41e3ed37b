"""`MLP`, and the `Activation` of it and of experts. Imports no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.engine.models.parts.tensors import Axis, LinearSpec, MatrixSpec, Part, Stack, matrix


@dataclass(frozen=True, slots=True)
class Activation:
    """clamp: (alpha, limit) of gpt-oss's, gate * sigmoid(alpha * gate) * (up + 1), of both clamped;
    None for the function of the gate, times up."""

    is_gelu: bool = False
    clamp: tuple[float, float] | None = None


SILU = Activation()


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP(Part):
    """size: of what the activation gives. is_fused: whether one tensor has gate and up."""

    LLAMA = (("activation", SILU, "activation"), ("has_bias", False, "mlp_bias"))

    hidden_size: int
    size: int
    activation: Activation = SILU
    has_bias: bool = False
    is_fused: bool = False

    @property
    def _inner(self) -> Axis:
        return Axis(self.size, key="intermediate_size")

    @property
    def linears(self) -> Mapping[str, LinearSpec]:
        """gate_up: both products of the states. down: back to them."""
        hidden, inner = Axis(self.hidden_size), self._inner
        names = ("mlp.gate_proj", "mlp.up_proj")
        gate_up = MatrixSpec(names, (inner,), hidden, ("ffn_gate", "ffn_up"))
        if self.is_fused:
            gate_up = MatrixSpec(("mlp.gate_up_proj",), (inner, inner), hidden, ("ffn_up",))
        down = matrix("mlp.down_proj", hidden, inner, "ffn_down")
        return {
            "gate_up": LinearSpec((gate_up,), self.has_bias, adapters=Stack.GATE_UP),
            "down": LinearSpec((down,), self.has_bias, adapters=Stack.DOWN),
        }

    def divided(self, num_ranks: int) -> "MLP":
        return replace(self, size=self._inner.num_own(num_ranks))
