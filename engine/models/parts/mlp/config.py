"""`MLP`, and the `Activation` of it and of experts. Imports no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.engine.models.parts.tensors import Axis, LinearSpec, MatrixSpec, Part, Stack, matrix


@dataclass(frozen=True, slots=True)
class Activation:
    """clamp: (alpha, limit) of gpt-oss's, gate * sigmoid(alpha * gate) * (up + 1), of both clamped;
    None for the function of the gate, times up. is_exact: GELU by the error function, not by
    tanh."""

    is_gelu: bool = False
    is_exact: bool = False
    clamp: tuple[float, float] | None = None


SILU = Activation()


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP(Part):
    """size: of what the activation gives. is_fused: whether one tensor has gate and up. has_gate:
    whether up is multiplied by the function of a gate, else the function is of up. has_up_first:
    in the tensor of both."""

    LLAMA = (
        ("activation", SILU, "activation"),
        ("has_bias", False, "mlp_bias"),
        ("has_down_bias", False, "mlp_down_bias"),
        ("has_gate", True, "mlp_without_gate"),
    )

    hidden_size: int
    size: int
    activation: Activation = SILU
    has_bias: bool = False
    has_down_bias: bool = False
    is_fused: bool = False
    has_gate: bool = True
    has_up_first: bool = False

    @property
    def _inner(self) -> Axis:
        return Axis(self.size, key="intermediate_size")

    @property
    def linears(self) -> Mapping[str, LinearSpec]:
        """gate_up: both products of the states, or up alone. down: back to them."""
        hidden, inner = Axis(self.hidden_size), self._inner
        names, gguf = ("mlp.gate_proj", "mlp.up_proj"), ("ffn_gate", "ffn_up")
        first = 0 if self.has_gate else 1
        gate_up = MatrixSpec(names[first:], (inner,), hidden, gguf[first:])
        if self.is_fused:
            gate_up = MatrixSpec(("mlp.gate_up_proj",), (inner, inner), hidden, ("ffn_up",))
        down = matrix("mlp.down_proj", hidden, inner, "ffn_down")
        return {
            "gate_up": LinearSpec((gate_up,), self.has_bias, adapters=Stack.GATE_UP),
            "down": LinearSpec((down,), self.has_bias or self.has_down_bias, adapters=Stack.DOWN),
        }

    def divided(self, num_ranks: int) -> "MLP":
        return replace(self, size=self._inner.num_own(num_ranks))
