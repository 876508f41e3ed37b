"""`Stage`: the layers of a model that one of several stages has, one after the other: pipeline
parallelism, as GPipe cuts a model (arXiv:1811.06965).

The first has the embedding, the last the final norm and the output layer. States go from each to
the next; of a model with per-layer inputs the embedded tokens as well, of which each stage makes
those of its own layers. Layers that read the keys and values of another are in its stage.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from penstock.engine.memory.pool.kv_layout import GroupPool, KVLayout
from penstock.engine.models.config import LAYER, ModelConfig, index_and_name
from penstock.engine.models.formats.scheme import KeptBytes
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.parts.per_layer_inputs.config import PROJECTION, TABLE, PerLayerInputs
from penstock.engine.models.parts.reader import TableRows, WeightSource
from penstock.scheduler.errors import InvalidConfig

_PLAIN_BYTES = 2


@dataclass(frozen=True)
class Stage:
    """model: the whole, or a rank's shard of its layers. index: of `num_stages`."""

    model: ModelConfig
    index: int
    num_stages: int

    def __post_init__(self) -> None:
        """Raises InvalidConfig for a model that cannot be cut so."""
        flag = f"--pipeline-parallel-size {self.num_stages}"
        if self.num_stages > self.model.num_layers:
            raise InvalidConfig(
                f"{flag}: this model has {self.model.num_layers} layers, and each stage needs one "
                f"at least; use --pipeline-parallel-size {self.model.num_layers} or less"
            )
        if self.num_stages > (most := 1 + len(stage_starts(self.model))):
            num_shared = sum(not attention.has_keys for attention in self.model.attentions)
            raise InvalidConfig(
                f"{flag}: the last {num_shared} of this model's layers read "
                "the keys and values of layers before them, which must be in the same stage, so "
                f"it has at most {most} stages; use --pipeline-parallel-size {most} or less"
            )
        quantization = self.model.quantization
        is_cut = self.model.per_layer_inputs and self.num_stages > 1
        if is_cut and quantization and quantization.scheme_of(PROJECTION):
            raise InvalidConfig(
                f"{flag}: {PROJECTION} is quantized, and a stage cannot read its own layers' rows "
                "of it; use --pipeline-parallel-size 1, or weights where it is not"
            )

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    @cached_property
    def layers(self) -> range:
        if self.num_stages == 1:
            return range(self.model.num_layers)
        starts = stage_starts(self.model)
        return divided(layer_weights(self.model), self.num_stages, starts)[self.index]

    @cached_property
    def config(self) -> ModelConfig:
        """Its layers alone, which count from 0."""
        return self.model if self.num_stages == 1 else self.model.part(self.layers)

    def layout(self, of_model: KVLayout) -> KVLayout:
        """Its layers in the groups that the whole model has, of which it may have none in some."""
        state = of_model.state
        if state is not None:
            state = replace(state, num_layers=sum(self.config.recurrent))
        group_of = of_model.group_of[self.layers.start : self.layers.stop]
        return replace(of_model, group_of=group_of, state=state)

    def pools(self, of_model: KVLayout, block_size: int, itemsize: int) -> list[GroupPool]:
        """Returns a block's size in the stage where it takes most: all have as many blocks."""
        stages = [replace(self, index=index) for index in range(self.num_stages)]
        of_stages = [
            stage.layout(of_model).pools(stage.config.kv_shape, block_size, itemsize)
            for stage in stages
        ]
        return [
            max(of_group, key=lambda pool: pool.block_bytes)
            for of_group in zip(*of_stages, strict=True)
        ]

    def absent_bytes(self, dtype_bytes: int, kept: KeptBytes | None = None) -> int:
        """Returns the bytes that `config` counts and this stage does not have. dtype_bytes,
        kept: as of `ModelConfig.weight_bytes`."""
        if self.num_stages == 1:
            return 0
        model = self.model
        norm = model.hidden_size * dtype_bytes
        embedding = model.vocab_size * norm
        output = _output_bytes(model, dtype_bytes, kept)
        counted = embedding + norm + (0 if model.head.is_tied else output)
        return counted - self.is_first * embedding - self.is_last * (output + norm)

    def of(self, weights: WeightSource) -> WeightSource:
        """The weights, of which its layers have the names that they have in `config`."""
        if self.num_stages == 1:
            return weights
        return _Renumbered(weights, self.model, self.layers)


def num_passed(model: ModelConfig) -> int:
    """How many vectors of hidden_size a stage sends to the next for each token: its states, and
    before them what was embedded, of which the per-layer inputs are made."""
    return 1 if model.per_layer_inputs is None else 2


def stage_starts(model: ModelConfig) -> list[int]:
    """The layers that a stage after the first may begin with, so that none reads the keys and
    values of an earlier stage."""
    sources = map(model.kv_shape.source_of, reversed(range(model.num_layers)))
    first_sources = list(accumulate(sources, min))[::-1]
    return [layer for layer in range(1, model.num_layers) if first_sources[layer] >= layer]


def layer_weights(model: ModelConfig) -> list[int]:
    """Returns the shares of a step's time: bytes of each layer's matrices as they are stored, or
    in 16 bits, and last those of the output layer."""
    shapes = ((shape for _, shape, _ in layer.tensors.quantizable()) for layer in model.layers)
    of_layers = [sum(map(math.prod, own)) * _PLAIN_BYTES for own in shapes]
    for name, scheme, (rows, columns), _ in model.quantized_layers():
        index, _ = index_and_name(name)
        if index is not None:
            of_layers[index] -= rows * columns * _PLAIN_BYTES - scheme.num_bytes(rows, columns)
    return [*of_layers, _output_bytes(model, _PLAIN_BYTES)]


def _output_bytes(model: ModelConfig, dtype_bytes: int, kept: KeptBytes | None = None) -> int:
    """Counts the output layer's bytes."""
    shape, scheme, held = (model.vocab_size, model.hidden_size), None, None
    if model.quantization is not None and not model.head.is_tied:
        scheme = model.quantization.scheme_of_part("lm_head", shape)
    if scheme is not None:
        held = scheme.num_bytes(*shape) if kept is None else kept(scheme, *shape)
    return math.prod(shape) * dtype_bytes if held is None else held


def divided(
    weights: list[int], num_stages: int, may_start: Sequence[int] | None = None
) -> list[range]:
    """The layers of each stage, at least one, so that the stage with most weights has as few as can
    be, and then the others are alike. weights: as of `layer_weights`. may_start: the layers that
    stages after the first may begin with, in order and enough of them; all by default."""
    *layers, output = weights
    ends = [0, *accumulate(layers)]
    starts_of_all = range(1, len(layers)) if may_start is None else may_start

    @cache
    def best(first: int, num_left: int) -> tuple[int, int, tuple[int, ...]]:
        """Divides the layers from `first` on into stages: the most weights of a stage, the sum of
        squares over the stages, and where each begins."""
        if num_left == 1:
            own = ends[-1] - ends[first] + output
            return own, own**2, (first,)
        options = []
        later = [start for start in starts_of_all if start > first]
        for end in later[: len(later) - num_left + 2]:  # the stages after that need starts too
            own, (most, squares, starts) = ends[end] - ends[first], best(end, num_left - 1)
            options.append((max(own, most), own**2 + squares, (first, *starts)))
        return min(options)

    *_, starts = best(0, num_stages)
    return [range(*pair) for pair in pairwise((*starts, len(layers)))]


class _Renumbered:
    """Another source, of a model of which it has some layers, which count from the first of
    these."""

    def __init__(self, source: WeightSource, model: ModelConfig, layers: range) -> None:
        self._source = source
        self._model = model
        self._layers = layers

    def read(self, shape: tuple[int, ...], *names: str, dtype: torch.dtype | None = None) -> Tensor:
        inputs = self._model.per_layer_inputs
        if inputs is None or names != (f"{PROJECTION}.weight",):
            return self._source.read(shape, *map(self._name, names), dtype=dtype)
        whole = inputs.linears["projection"].shape
        return self._source.read(whole, *names)[self._layer_columns(inputs)].clone()

    def table(self, shape: tuple[int, int], name: str) -> TableRows:
        inputs = self._model.per_layer_inputs
        assert inputs is not None and name == f"{TABLE}.weight", name
        rows, columns = self._source.table(inputs.table_shape, name), self._layer_columns(inputs)
        return lambda ids: rows(ids)[:, columns]

    def _layer_columns(self, inputs: PerLayerInputs) -> slice:
        return slice(self._layers.start * inputs.size, self._layers.stop * inputs.size)

    def quantized(self, shape: tuple[int, int], bias: Tensor | None, *names: str) -> Linear | None:
        return self._source.quantized(shape, bias, *map(self._name, names))

    def _name(self, name: str) -> str:
        index, rest = index_and_name(name)
        return name if index is None else f"{LAYER}{index + self._layers.start}.{rest}"
