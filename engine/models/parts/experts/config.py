"""`Experts`: what config.json says of a mixture of experts. Imports no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.engine.files.json_file import Fields
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.parts.mlp.config import SILU, Activation
from penstock.engine.models.parts.tensors import (
    Axis,
    LinearSpec,
    MatrixSpec,
    Part,
    VectorSpec,
    matrix,
)

# Far more than any model has.
_MAX_EXPERTS = 2**14
MAX_WIDTH = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Part):
    """A router gives each token a logit for every expert; it is computed by those of the highest
    logits, of equal ones the first, and their outputs are added up by weight.

    size: of one expert's activations. is_normed: the weights are a softmax over the chosen experts;
    otherwise over all. has_biases: of the router and of the experts. router, experts: their names
    in a layer. shared_size: of the expert that computes every token besides, by the weight that a
    gate of its own gives; 0 where there is none. is_beside_mlp: whether the layer has an MLP as
    well, as those of Gemma 4; it also has norms of what router and experts read and give, and a
    factor of each expert's weight.
    """

    LLAMA = (
        ("num_experts", 0, "experts"),
        ("activation", SILU, "activation"),
        ("shared_size", 0, "shared_expert"),
        ("is_beside_mlp", False, "experts_beside_mlp"),
    )

    hidden_size: int
    num_experts: int
    num_per_token: int
    size: int
    is_normed: bool
    activation: Activation = SILU
    has_biases: bool = False
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    shared_size: int = 0
    is_beside_mlp: bool = False

    @property
    def linears(self) -> Mapping[str, LinearSpec]:
        """router; shared_gate_up, shared_down, shared_gate: of the shared expert; gate_up, down: of
        all experts, one after the other."""
        hidden, inner = Axis(self.hidden_size), self._inner
        router = matrix(self.router, Axis(self.num_experts), hidden, "ffn_gate_inp")

        def stacked(rows: Axis, columns: Axis, *kinds: str) -> MatrixSpec:
            each = (f"{self.experts}.{number}" for number in range(self.num_experts))
            names = tuple(f"{expert}.{kind}_proj" for expert in each for kind in kinds)
            return MatrixSpec(names, (rows,), columns, tuple(f"ffn_{kind}_exps" for kind in kinds))

        gate_up, down = stacked(inner, hidden, "gate", "up"), stacked(hidden, inner, "down")
        each, biases = self.num_per_token, self.has_biases
        return {
            "router": LinearSpec((router,), biases, is_quantizable=False),
            **self._shared_linears,
            "gate_up": LinearSpec((gate_up,), biases, num_used=2 * each),
            "down": LinearSpec((down,), biases, num_used=each),
        }

    @property
    def _shared_linears(self) -> Mapping[str, LinearSpec]:
        if not self.shared_size:
            return {}
        hidden, name = Axis(self.hidden_size), "mlp.shared_expert"
        inner = Axis(self.shared_size, key="shared_expert_intermediate_size")
        both = (f"{name}.gate_proj", f"{name}.up_proj")
        gate = matrix(f"{name}_gate", Axis(1), hidden)
        return {
            "shared_gate_up": LinearSpec((MatrixSpec(both, (inner,), hidden),)),
            "shared_down": LinearSpec((matrix(f"{name}.down_proj", hidden, inner),)),
            "shared_gate": LinearSpec((gate,), is_quantizable=False),
        }

    @property
    def vectors(self) -> Mapping[str, VectorSpec]:
        """router_norm, input_norm: of what router and experts read. mlp_norm, output_norm: of what
        the MLP and the experts give, before both are added. factors: of each expert's weight."""
        if not self.is_beside_mlp:
            return {}

        def vector(name: str, size: int, gguf: str) -> VectorSpec:
            return VectorSpec(name, (Axis(size),), gguf=gguf)

        def norm(place: str, number: int) -> VectorSpec:
            name, gguf = f"{place}_feedforward_layernorm_{number}", f"{place}_ffw_norm_{number}"
            return vector(f"{name}.weight", self.hidden_size, f"{gguf}.weight")

        factors = "router.per_expert_scale", self.num_experts, "ffn_down_exps.scale"
        return {
            "router_norm": vector("router.scale", self.hidden_size, "ffn_gate_inp.scale"),
            "factors": vector(*factors),
            "input_norm": norm("pre", 2),
            "mlp_norm": norm("post", 1),
            "output_norm": norm("post", 2),
        }

    @property
    def _inner(self) -> Axis:
        return Axis(self.size, key="moe_intermediate_size")

    def divided(self, num_ranks: int) -> "Experts":
        return replace(
            self, size=self._inner.num_own(num_ranks), shared_size=self.shared_size // num_ranks
        )


def read_experts(
    fields: Fields,
    *,
    size: str = "moe_intermediate_size",
    num_per_token: str = "num_experts_per_tok",
    least: int = 0,
    **others: Any,
) -> Experts | None:
    """None where the model has none. Raises InvalidModel.

    size, num_per_token: the keys of an expert's size, and of how many compute a token. least: how
    many experts the model must have. others: of `Experts`.
    """
    width = fields.count(size, most=MAX_WIDTH)
    # transformers writes the first of these names, and reads both.
    fields.get("num_local_experts")
    name = "num_local_experts" if fields.get("num_experts") is None else "num_experts"
    num_experts = fields.count(name, least=least, most=_MAX_EXPERTS)
    num_each = fields.count(num_per_token)
    if not num_experts:
        return None
    if num_each > num_experts:
        raise InvalidModel(
            f"{fields.path}: {num_per_token} ({num_each}) must be at most {name} ({num_experts})"
        )
    return Experts(
        hidden_size=fields.count("hidden_size"),
        num_experts=num_experts,
        num_per_token=num_each,
        size=width,
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
