"""`ExpertsConfig`: the layers whose MLP is a mixture of experts, as config.json describes them.
Imports no tensors."""

from dataclasses import dataclass
from typing import Any

from penstock.engine.model_info import RoutedExperts
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.json_file import Fields

# Far more than any model has.
_MAX_EXPERTS = 2**14
MAX_WIDTH = 2**22
# Of the shared expert, in a layer.
SHARED_GATE_UP = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
SHARED_DOWN = "mlp.shared_expert.down_proj"
SHARED_GATE = "mlp.shared_expert_gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A router gives each token a logit for every expert; it is computed by those of the highest
    logits, of equal ones the first, and their outputs are added up by weight.

    layers: for each of the model's layers, whether it has experts; the others have one MLP.
    intermediate_size: of one expert. is_normed: the weights are a softmax over the chosen experts;
    otherwise over all. has_biases: of the router and of the experts. router, experts: their names
    in a layer. shared_size: of the expert that computes every token besides, by the weight that a
    gate of its own gives; 0 where there is none. is_beside_mlp: whether the layers have one MLP as
    well, as those of Gemma 4; these also have norms of what router and experts read and give, and a
    factor of each expert's weight.
    """

    layers: tuple[bool, ...]
    num_experts: int
    num_per_token: int
    intermediate_size: int
    is_normed: bool
    has_biases: bool = False
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    shared_size: int = 0
    is_beside_mlp: bool = False

    @property
    def num_layers(self) -> int:
        """Those with experts."""
        return sum(self.layers)

    def routed(self, num_bytes: int) -> RoutedExperts:
        """num_bytes: of all experts of all layers."""
        return RoutedExperts(
            num_layers=self.num_layers,
            num_experts=self.num_experts,
            num_experts_per_token=self.num_per_token,
            expert_bytes=num_bytes // (self.num_layers * self.num_experts),
        )

    def gate_up_names(self) -> list[str]:
        """Of a layer's experts, one after the other, as they are stacked into one matrix."""
        return [
            f"{self.experts}.{expert}.{name}"
            for expert in range(self.num_experts)
            for name in ("gate_proj", "up_proj")
        ]

    def down_names(self) -> list[str]:
        """The same, of what leads back to the states."""
        return [f"{self.experts}.{expert}.down_proj" for expert in range(self.num_experts)]

    def linear_shapes(self, hidden_size: int) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of a layer's matrices by name, without the router, which no
        checkpoint quantizes."""
        shapes = {
            **dict.fromkeys(self.gate_up_names(), (self.intermediate_size, hidden_size)),
            **dict.fromkeys(self.down_names(), (hidden_size, self.intermediate_size)),
        }
        if self.shared_size:
            shapes |= dict.fromkeys(SHARED_GATE_UP, (self.shared_size, hidden_size))
            shapes[SHARED_DOWN] = (hidden_size, self.shared_size)
        return shapes

    def num_router_weights(self, hidden_size: int) -> int:
        """Elements, in one layer, norms and factors included."""
        of_router = self.num_experts * (hidden_size + self.has_biases)
        return of_router + (self.num_experts + 4 * hidden_size) * self.is_beside_mlp

    def num_shared_weights(self, hidden_size: int) -> int:
        """Elements of the shared expert and its gate, in one layer."""
        return (3 * self.shared_size + 1) * hidden_size if self.shared_size else 0

    def num_weights(self, hidden_size: int) -> int:
        """Elements of one expert."""
        matrices = 3 * self.intermediate_size * hidden_size
        return matrices + (2 * self.intermediate_size + hidden_size) * self.has_biases


def read_experts(
    fields: Fields,
    layers: tuple[bool, ...],
    *,
    intermediate_size: int,
    is_normed: bool,
    num_per_token: str = "num_experts_per_tok",
    **others: Any,
) -> ExpertsConfig | None:
    """None where no layer has any. Raises InvalidModel.

    num_per_token: the key that counts those of a token. others: of `ExpertsConfig`.
    """
    # transformers writes the first of these names, and reads both.
    fields.get("num_local_experts")
    name = "num_local_experts" if fields.get("num_experts") is None else "num_experts"
    num_experts = fields.count(name, least=0, most=_MAX_EXPERTS)
    num_each = fields.count(num_per_token)
    if not num_experts or not any(layers):
        return None
    if num_each > num_experts:
        raise InvalidModel(
            f"{fields.path}: {num_per_token} ({num_each}) must be at most {name} ({num_experts})"
        )
    return ExpertsConfig(
        layers=layers,
        num_experts=num_experts,
        num_per_token=num_each,
        intermediate_size=intermediate_size,
        is_normed=is_normed,
        **others,
    )


def qwen_layers(fields: Fields) -> tuple[bool, ...]:
    """Which layers have experts: every decoder_sparse_step-th, but for mlp_only_layers."""
    num_layers = fields.count("num_hidden_layers")
    step = fields.count("decoder_sparse_step", default=1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(
        type(each) is int and 0 <= each < num_layers for each in dense
    ):
        raise fields.wrong(
            "mlp_only_layers", f"a list of layers, from 0 to {num_layers - 1}", dense
        )
    return tuple((index + 1) % step == 0 and index not in dense for index in range(num_layers))
