"""`Shard`: the part of a model that one of several ranks has, as Megatron-LM splits it
(arXiv:1909.08053).

Attention and gated delta nets are split by heads, MLPs and each expert by their intermediate size,
embedding and output layer by the vocabulary. So a layer's first matrices have some of the rows, its
last ones some of the columns, and the ranks' results add up to the layer's. Everything else is on
all of them: of Gemma 4's per-layer inputs the table, which stays in its file, and matrices that are
too narrow for what a third sum in each layer takes.
"""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

from torch import Tensor

from penstock.engine.memory.kv_shape import KVHeads
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.cut import CannotCut, Cut, Span
from penstock.engine.models.delta_net import DeltaNetConfig
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.experts import ExpertsConfig
from penstock.engine.models.quantization.schemes import columns_of_scale
from penstock.scheduler.errors import InvalidConfig

# Of ModelConfig: the features that it knows how to split.
FEATURES = {
    *("tied_embeddings", "qkv_bias", "output_bias", "mlp_bias", "qk_norm", "whole_qk_norm"),
    *("pre_norms", "post_norms", "wide_norms", "norm_offset", "activation", "layer_ropes"),
    *("rotary_dim", "query_scaling", "attention_scale", "embedding_multiplier"),
    *("logit_multiplier", "experts", "attention_sinks", "clamped_swiglu"),
    *("delta_net", "attention_gates"),
    *("full_heads", "keys_are_values", "value_norm", "num_shared_kv_layers", "wide_shared_mlps"),
    *("layer_scalars", "per_layer_inputs", "logit_softcap"),
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Of quantized weights, columns of a rank that share a scale: as many as words of 4 bits hold, and
# the fewest that a processor computes with their codes.
_LEAST_COLUMNS = 8


@dataclass(frozen=True)
class Shard:
    """model: the whole. rank: of `size`."""

    model: ModelConfig
    rank: int
    size: int

    def __post_init__(self) -> None:
        """Raises InvalidConfig for a model that cannot be split so."""
        model, size = self.model, self.size
        flag = f"--tensor-parallel-size {size}"
        if unknown := model.features - FEATURES:
            raise InvalidConfig(
                f"{flag}: this model has {', '.join(sorted(unknown))}, which cannot be split over "
                "ranks so far; use --tensor-parallel-size 1"
            )
        counts = {"num_attention_heads": model.num_heads}
        has_mlps = model.experts is not None and model.experts.is_beside_mlp
        if has_mlps or any(model.experts_of(index) is None for index in range(model.num_layers)):
            counts["intermediate_size"] = model.intermediate_size
        if model.experts is not None:
            counts["moe_intermediate_size"] = model.experts.intermediate_size
            counts["shared_expert_intermediate_size"] = model.experts.shared_size
        if model.delta_net is not None:
            counts["linear_num_value_heads"] = model.delta_net.num_value_heads
        # Of which several ranks have the same one, where there are more ranks.
        shared_heads = {"num_key_value_heads": model.num_kv_heads}
        if model.full_heads is not None:
            shared_heads["num_global_key_value_heads"] = model.full_heads.num_kv_heads
        if model.delta_net is not None:
            shared_heads["linear_num_key_heads"] = model.delta_net.num_key_heads
        for name, count in counts.items():
            if count % size:
                raise InvalidConfig(
                    f"{flag}: this model's {name} is {count}, which is not a multiple of {size}; "
                    f"use {self._possible(counts, shared_heads)}"
                )
        for name, count in shared_heads.items():
            if count % size and size % count:
                raise InvalidConfig(
                    f"{flag}: this model's {name} is {count}, which is neither a multiple of "
                    f"{size} nor a divisor; use "
                    f"{self._possible(counts, shared_heads)}"
                )
        for columns, width in sorted(self._coded):
            if not _keeps_groups(columns, width, size):
                raise InvalidConfig(
                    f"{flag}: a rank would have {columns // size} of the {columns} columns of a "
                    f"matrix whose weights are quantized, {width} of them with one scale; those of "
                    f"one scale must be divided into multiples of {_LEAST_COLUMNS}: use "
                    f"{self._possible(counts, shared_heads)}"
                )

    @cached_property
    def _coded(self) -> frozenset[tuple[int, int]]:
        """Of quantized matrices whose columns are divided: how many, and how many share a scale."""
        return frozenset(
            (columns, columns_of_scale(scheme) or columns)
            for name, scheme, (_, columns) in self.model.quantized_layers()
            if self.cut(name).columns is not None
        )

    def _possible(self, counts: dict[str, int], shared_heads: dict[str, int]) -> str:
        """The numbers of ranks that divide each of counts, may divide or share heads, and keep what
        shares a scale together."""
        sizes = [
            str(size)
            for size in range(1, 17)
            if not any(count % size for count in counts.values())
            and not any(count % size and size % count for count in shared_heads.values())
            and all(_keeps_groups(*each, size) for each in self._coded)
        ]
        return " or ".join(sizes)

    @cached_property
    def config(self) -> ModelConfig:
        """Of this rank's part. Its vocab_size is of all ranks the same, and all together may have a
        few ids more than there are."""
        model, size, quantization = self.model, self.size, self.model.quantization
        experts: ExpertsConfig | None = None
        if model.experts is not None:
            intermediate_size = model.experts.intermediate_size // size
            shared_size = model.experts.shared_size // size
            experts = replace(
                model.experts, intermediate_size=intermediate_size, shared_size=shared_size
            )
        delta_net: DeltaNetConfig | None = None
        if (net := model.delta_net) is not None:
            delta_net = replace(
                net,
                num_key_heads=max(1, net.num_key_heads // size),
                num_value_heads=net.num_value_heads // size,
            )
        full_heads = model.full_heads
        if full_heads is not None:
            num_kv_heads = max(1, full_heads.num_kv_heads // size)
            full_heads = full_heads._replace(num_kv_heads=num_kv_heads)
        return replace(
            model,
            vocab_size=-(-model.vocab_size // size),
            num_heads=model.num_heads // size,
            num_kv_heads=max(1, model.num_kv_heads // size),
            full_heads=full_heads,
            intermediate_size=model.intermediate_size // size,
            experts=experts,
            delta_net=delta_net,
            quantization=None if quantization is None else quantization.over_ranks(size),
        )

    @property
    def first_id(self) -> int:
        """Of this rank's part of the vocabulary."""
        return self.rank * self.config.vocab_size

    def splits(self, name: str) -> bool:
        """Whether ranks have different parts of this tensor."""
        return self._rows(name) is not None or self._columns(name) is not None

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor of the checkpoint: a view, so that no more is read, but for
        what has to be padded. Raises InvalidModel where config.json implies another size."""
        cut = self._cut(name)
        try:
            tensor = cut.columns_of(cut.rows_of(tensor))
        except CannotCut as error:
            raise InvalidModel(f"the tensor {name!r} {error}") from None
        if self.rank and self._is_added_once(name):
            return tensor.new_zeros(()).expand(tensor.shape)
        return tensor

    def of_change(self, name: str, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of up @ down, a change of the matrix `name`: all ranks have one of the
        two, as they multiply it with what all have, or with what is summed after it."""
        if self._rows(name) is not None:
            return down, self.of(name, up)
        return (down, up) if self._columns(name) is None else (self.of(name, down), up)

    def cut(self, layer: str) -> Cut:
        """This rank's part of a linear layer, whatever the tensors that it is stored in."""
        return self._cut(f"{layer}.weight")

    def _cut(self, name: str) -> Cut:
        return Cut(self._rows(name), self._columns(name))

    def _rows(self, name: str) -> tuple[Span, ...] | None:
        """The parts of a tensor's rows, of each of the tensors that are fused in it."""
        model = self.model
        layer, kind = _layer_and_kind(name)
        num_heads, head_dim = self._heads(name)
        query = self._even(model.num_heads * head_dim * (1 + model.attention_gates))
        key = self._shared(num_heads, head_dim)
        mlp = self._even(self._intermediate_size(name))
        by_layer = {
            "q_proj": (query,),
            "k_proj": (key,),
            "v_proj": (key,),
            "qkv_proj": (query, key, key),
            "gate_proj": (mlp,),
            "up_proj": (mlp,),
            "gate_up_proj": (mlp, mlp),
            "embed_tokens": (self._vocabulary,),
            "lm_head": (self._vocabulary,),
        }
        if model.whole_qk_norm:
            by_layer |= {"q_norm": (query,), "k_norm": (key,)}
        if (net := model.delta_net) is not None:
            keys = self._shared(net.num_key_heads, net.key_dim)
            values, heads = self._even(net.num_values), self._even(net.num_value_heads)
            by_layer |= {
                "in_proj_qkv": (keys, keys, values),
                "conv1d": (keys, keys, values),
                "in_proj_z": (values,),
                "in_proj_b": (heads,),
                "in_proj_a": (heads,),
            }
            if kind in ("A_log", "dt_bias"):
                return (heads,)
        if kind == "sinks":
            return (self._even(model.num_heads),)
        return by_layer.get(layer)

    def _columns(self, name: str) -> Span | None:
        layer, kind = _layer_and_kind(name)
        if kind == "bias":
            return None
        if layer == "o_proj":
            return self._even(self.model.num_heads * self._heads(name).head_dim)
        if layer == "out_proj" and self.model.delta_net is not None:
            return self._even(self.model.delta_net.num_values)
        return self._even(self._intermediate_size(name)) if layer == "down_proj" else None

    def _heads(self, name: str) -> KVHeads:
        """Of the whole model, in the tensor's layer."""
        index = _index(name)
        if index is None:
            return KVHeads(self.model.num_kv_heads, self.model.head_dim)
        return self.model.layer_shape(index).heads

    def _intermediate_size(self, name: str) -> int:
        if ".experts." in name:
            assert self.model.experts is not None, name
            return self.model.experts.intermediate_size
        if ".shared_expert." in name:
            assert self.model.experts is not None, name
            return self.model.experts.shared_size
        index = _index(name)
        if index is None:
            return self.model.intermediate_size
        return self.model.layer_shape(index).intermediate_size

    @property
    def _vocabulary(self) -> Span:
        first = self.first_id
        return Span(self.model.vocab_size, first, first + self.config.vocab_size)

    def _shared(self, count: int, dim: int) -> Span:
        """Of so many heads of keys, of which several ranks have the same one if there are fewer."""
        first, own = self.rank * count // self.size, max(1, count // self.size)
        return Span(count * dim, first * dim, (first + own) * dim)

    def _even(self, whole: int) -> Span:
        each = whole // self.size
        return Span(whole, self.rank * each, (self.rank + 1) * each)

    @staticmethod
    def _is_added_once(name: str) -> bool:
        """Of what is added after the ranks' columns, by rank 0 alone."""
        layer, kind = _layer_and_kind(name)
        return kind == "bias" and layer in ("o_proj", "down_proj")


def _keeps_groups(columns: int, width: int, size: int) -> bool:
    return columns % size == 0 and gcd(width, columns // size) % _LEAST_COLUMNS == 0


def _index(name: str) -> int | None:
    """Of the layer that a tensor is of."""
    found = _LAYER.match(name)
    return None if found is None else int(found[1])


def _layer_and_kind(name: str) -> tuple[str, str]:
    """The last two parts: "q_proj" and "weight", say."""
    *_, layer, kind = name.rsplit(".", 2)
    return layer, kind
