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
# Is added to the sum that sigmoids are divided by, which may be 0.
LEAST_SUM = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Part):
    """A router gives each token a logit for every expert; it is computed by those of the highest
    logits, of equal ones the first, and their outputs are added up by weight.

    size: of one expert's activations. has_sigmoids: a weight is the sigmoid of a logit; otherwise
    the softmax over all experts. is_normed: the weights of the chosen experts are divided by their
    sum. weight_factor: what they are multiplied by then. has_biases: of the router and of the
    experts. router, experts, shared: their names in a layer. shared_size: of the expert that
    computes every token besides, by the weight that a gate of its own gives, or where there is no
    such gate by 1; 0 where there is none. is_beside_mlp: whether the layer has an MLP as well, as
    those of Gemma 4; it also has norms of what router and experts read and give, and a factor of
    each expert's weight.

    has_corrections: whether experts are chosen by the sum of their weight and a number that each of
    them has. num_groups: they lie in so many groups, one after the other, of which the best
    num_groups_used have those that may be chosen, of equal ones the first. num_best: a group is as
    good as so many of its experts, the best, are together.

    Sources: DeepSeek-AI 2024, DeepSeek-V2, section 2.2 (arXiv:2405.04434), and DeepSeek-V3, section
    2.1.2 (arXiv:2412.19437).
    """

    LLAMA = (
        ("num_experts", 0, "experts"),
        ("activation", SILU, "activation"),
        ("has_sigmoids", False, "sigmoid_weights"),
        ("num_groups", 1, "expert_groups"),
        ("shared_size", 0, "shared_expert"),
        ("is_beside_mlp", False, "experts_beside_mlp"),
    )

    hidden_size: int
    num_experts: int
    num_per_token: int
    size: int
    is_normed: bool
    has_sigmoids: bool = False
    has_corrections: bool = False
    num_groups: int = 1
    num_groups_used: int = 1
    num_best: int = 1
    weight_factor: float = 1.0
    activation: Activation = SILU
    has_biases: bool = False
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    shared: str = "mlp.shared_expert"
    shared_size: int = 0
    has_shared_gate: bool = True
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
        hidden, name = Axis(self.hidden_size), self.shared
        key = "shared_expert_intermediate_size" if self.has_shared_gate else self._inner.key
        inner = Axis(self.shared_size, key=key)
        both = (f"{name}.gate_proj", f"{name}.up_proj")
        gguf = ("ffn_gate_shexp", "ffn_up_shexp")
        down = matrix(f"{name}.down_proj", hidden, inner, "ffn_down_shexp")
        linears = {
            "shared_gate_up": LinearSpec((MatrixSpec(both, (inner,), hidden, gguf),)),
            "shared_down": LinearSpec((down,)),
        }
        if self.has_shared_gate:
            gate = matrix(f"{name}_gate", Axis(1), hidden, "ffn_gate_inp_shexp")
            linears["shared_gate"] = LinearSpec((gate,), is_quantizable=False)
        return linears

    @property
    def vectors(self) -> Mapping[str, VectorSpec]:
        """router_norm, input_norm: of what router and experts read. mlp_norm, output_norm: of what
        the MLP and the experts give, before both are added. factors: of each expert's weight.
        corrections: of the weights by which experts are chosen."""
        if self.has_corrections:
            name = f"{self.router}.e_score_correction_bias"
            axes, gguf = (Axis(self.num_experts),), "exp_probs_b.bias"
            return {"corrections": VectorSpec(name, axes, gguf=gguf)}
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
    name: str | None = None,
    least: int = 0,
    **others: Any,
) -> Experts | None:
    """None where the model has none. Raises InvalidModel.

    size, num_per_token, name: the keys of an expert's size, of how many compute a token, and of how
    many there are. least: how many experts the model must have. others: of `Experts`.
    """
    width = fields.count(size, most=MAX_WIDTH)
    if name is None:
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


def deepseek_experts(
    fields: Fields, *, has_sigmoids: bool = True, num_best: int = 2, **others: Any
) -> Experts:
    """Those of DeepSeek-V3, and of all whose layers are like its. Raises InvalidModel.

    has_sigmoids, num_best, others: of `Experts`; both are others in DeepSeek-V2.
    """
    experts = read_experts(
        fields,
        name="n_routed_experts",
        least=1,
        is_normed=fields.flag("norm_topk_prob"),
        has_sigmoids=has_sigmoids,
        has_corrections=has_sigmoids,
        weight_factor=fields.number("routed_scaling_factor", 1.0),
        shared="mlp.shared_experts",
        has_shared_gate=False,
        **others,
    )
    assert experts is not None, "there is one at least"
    scores = "sigmoid" if has_sigmoids else "softmax"
    methods = ["noaux_tc"] if has_sigmoids else ["greedy", "group_limited_greedy"]
    if fields.text("scoring_func") not in (scores, None):
        raise fields.wrong("scoring_func", repr(scores), fields.get("scoring_func"))
    if fields.text("topk_method") not in (*methods, None):
        raise fields.wrong("topk_method", " or ".join(methods), fields.get("topk_method"))
    if experts.is_normed and num_best == 1:  # of which transformers makes something of its own
        raise fields.wrong("norm_topk_prob", "false for this architecture", True)
    shared = fields.count("n_shared_experts", default=0, least=0, most=_MAX_EXPERTS)
    return replace(experts, shared_size=shared * experts.size, **_groups(fields, experts, num_best))


def _groups(fields: Fields, experts: Experts, num_best: int) -> dict[str, Any]:
    """Reads the groups of experts; nothing where all of them are used."""
    num = fields.count("n_group", default=1, most=_MAX_EXPERTS)
    used = fields.count("topk_group", default=1)
    if used >= num or fields.text("topk_method") == "greedy":
        return {}
    size, rest = divmod(experts.num_experts, num)
    if rest or size < num_best or used * size < experts.num_per_token:
        raise InvalidModel(
            f"{fields.path}: of n_group ({num}) groups of n_routed_experts "
            f"({experts.num_experts}), topk_group ({used}) must have num_experts_per_tok "
            f"({experts.num_per_token}) experts, and each as many as the others and {num_best} or "
            "more"
        )
    return {"num_groups": num, "num_groups_used": used, "num_best": num_best}


def deepseek_layers(fields: Fields, num_dense: int = 0) -> tuple[bool, ...]:
    """Which layers have experts: every moe_layer_freq-th but the first first_k_dense_replace, or
    those that mlp_layer_types names. num_dense: how many these first are by default."""
    num_layers = fields.count("num_hidden_layers")
    first = fields.count("first_k_dense_replace", default=num_dense, least=0)
    step = fields.count("moe_layer_freq", default=1)
    kinds = fields.names("mlp_layer_types")
    if kinds is None:
        return tuple(index >= first and index % step == 0 for index in range(num_layers))
    if len(kinds) != num_layers or not {*kinds} <= {"dense", "sparse"}:
        raise fields.wrong("mlp_layer_types", f"dense or sparse for {num_layers} layers", kinds)
    return tuple(kind == "sparse" for kind in kinds)
