"""`Layer`: the parts that a layer is made of, as config.json describes them. Imports no tensors."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.engine.models.parts.attention.config import Attention
from penstock.engine.models.parts.experts.config import Experts
from penstock.engine.models.parts.latent_attention.config import LatentAttention
from penstock.engine.models.parts.mlp.config import MLP
from penstock.engine.models.parts.norm.config import Norms
from penstock.engine.models.parts.per_layer_inputs.config import PerLayerInput
from penstock.engine.models.parts.tensors import Part, TensorTable


@dataclass(frozen=True, kw_only=True)
class Layer:
    """mixer: what mixes the tokens of a sequence: attention, or a part with a recurrent state. mlp,
    experts: at least one of them; where there are both, their outputs are added. per_layer_input:
    of Gemma 4, or None.
    """

    norms: Norms
    mixer: Part
    mlp: MLP | None
    experts: Experts | None = None
    per_layer_input: PerLayerInput | None = None

    @property
    def attention(self) -> Attention | LatentAttention | None:
        return self.mixer if isinstance(self.mixer, Attention | LatentAttention) else None

    @property
    def is_recurrent(self) -> bool:
        return self.mixer.state_shape(1) is not None

    @property
    def window(self) -> int | None:
        """None where it attends to all positions, or does not attend."""
        return None if self.attention is None else self.attention.window

    @property
    def parts(self) -> Iterator[Part]:
        """In the order in which they are read."""
        parts = (self.norms, self.mixer, self.mlp, self.experts, self.per_layer_input)
        yield from (part for part in parts if part is not None)

    @cached_property
    def tensors(self) -> TensorTable:
        return TensorTable(tuple(self.parts))

    @property
    def num_products(self) -> int:
        """How many products a token takes, beside those with its own keys and values."""
        return self.tensors.num_products() + self.mixer.num_state_products

    def divided(self, num_ranks: int) -> "Layer":
        """Returns the part of it that each of so many ranks has."""
        return replace(
            self,
            mixer=self.mixer.divided(num_ranks),
            mlp=self.mlp and self.mlp.divided(num_ranks),
            experts=self.experts and self.experts.divided(num_ranks),
        )

    @property
    def features(self) -> frozenset[str]:
        return frozenset().union(*(part.features for part in self.parts))
