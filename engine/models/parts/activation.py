"""`Activation`: what an MLP and experts make of a gate and the product beside it. Imports no
tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Activation:
    """clamp: (alpha, limit) of gpt-oss's, gate * sigmoid(alpha * gate) * (up + 1), of both clamped;
    None for the function of the gate, times up."""

    is_gelu: bool = False
    clamp: tuple[float, float] | None = None


SILU = Activation()
