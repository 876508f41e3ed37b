"""`Layer`: the parts that a layer is made of, as config.json describes them. Imports no tensors."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from penstock.engine.models.parts.attention.config import Attention
from penstock.engine.models.parts.delta_net.config import DeltaNet
from penstock.engine.models.parts.experts.config import Experts
from penstock.engine.models.parts.mlp.config import MLP
from penstock.engine.models.parts.norm.config import Norms, Scalar
from penstock.engine.models.parts.per_layer_inputs.config import PerLayerInput
from penstock.engine.models.parts.tensors import Part, TensorTable


@dataclass(frozen=True, kw_only=True)
class Layer:
    """mixer: what mixes the tokens of a sequence. mlp, experts: at least one of them; where there
    are both, their outputs are added. per_layer_input, scalar: of Gemma 4, or None.
    """

    norms: Norms
    mixer: Attention | DeltaNet
    mlp: MLP | None
    experts: Experts | None = None
    per_layer_input: PerLayerInput | None = None
    scalar: Scalar | None = None

    @property
    def attention(self) -> Attention | None:
        return self.mixer if isinstance(self.mixer, Attention) else None

    @property
    def delta_net(self) -> DeltaNet | None:
        return self.mixer if isinstance(self.mixer, DeltaNet) else None

    @property
    def window(self) -> int | None:
        """None where it attends to all positions, or does not attend."""
        return None if self.attention is None else self.attention.window

    @property
    def parts(self) -> Iterator[Part]:
        """In the order in which they are read."""
        others = (self.mlp, self.experts, self.per_layer_input, self.scalar)
        yield self.norms
        yield self.mixer
        yield from (part for part in others if part is not None)

    @cached_property
    def tensors(self) -> TensorTable:
        return TensorTable(tuple(self.parts))

    @property
    def num_products(self) -> int:
        """How many products a token takes, beside those with its own keys and values."""
        return self.tensors.num_products() + (self.delta_net.num_products if self.delta_net else 0)

    def divided(self, num_ranks: int) -> "Layer":
        """What each of so many ranks has of it."""
        return Layer(
            norms=self.norms.divided(num_ranks),
            mixer=self.mixer.divided(num_ranks),
            mlp=self.mlp and self.mlp.divided(num_ranks),
            experts=self.experts and self.experts.divided(num_ranks),
            per_layer_input=self.per_layer_input,
            scalar=self.scalar,
        )

    @property
    def features(self) -> frozenset[str]:
        return frozenset().union(*(part.features for part in self.parts))
