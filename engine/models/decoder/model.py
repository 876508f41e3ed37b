"""A decoder in torch: layers of parts, as `ModelConfig` lists them.

All tokens of a step are one (T, hidden_size) tensor, whichever sequences they belong to; only
attention distinguishes them. The output layer gets only the rows that sample, and those of prompts
whose logprobs were requested.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.memory.pool.kv_pool import LayerPools
from penstock.engine.models.config import LAYER, ModelConfig
from penstock.engine.models.division.shard import Shard
from penstock.engine.models.division.stage import Stage, num_passed
from penstock.engine.models.layers.linear import Linear, MakeLinear, PlainLinear
from penstock.engine.models.parts.attention.config import Attention
from penstock.engine.models.parts.attention.layer import AttentionLayer
from penstock.engine.models.parts.attention.rotary import RotaryTables
from penstock.engine.models.parts.delta_net.config import DeltaNet
from penstock.engine.models.parts.delta_net.layer import (
    DeltaNetLayer,
    Segments,
    segments_of,
)
from penstock.engine.models.parts.experts.layer import ExpertsLayer
from penstock.engine.models.parts.latent_attention.config import LatentAttention
from penstock.engine.models.parts.latent_attention.layer import LatentAttentionLayer
from penstock.engine.models.parts.layer import Layer
from penstock.engine.models.parts.mlp.layer import MLPLayer
from penstock.engine.models.parts.norm.layer import NormsLayer, normed
from penstock.engine.models.parts.per_layer_inputs.layer import (
    PerLayerInputLayer,
    PerLayerInputsTable,
)
from penstock.engine.models.parts.reader import PartLayer, PartReader, WeightSource, summed
from penstock.engine.models.parts.tensors import Part
from penstock.engine.models.parts.vocabulary.layer import EmbeddedSums, embed, scaled_logits
from penstock.engine.ranks.group import Group
from penstock.engine.ranks.pipeline import Pipeline
from penstock.engine.step.model_input import ModelInput

MixerLayer = AttentionLayer | LatentAttentionLayer | DeltaNetLayer
# By the settings of what mixes a layer's tokens.
_MIXERS: dict[type[Part], Callable[[Any, PartReader], MixerLayer]] = {
    Attention: AttentionLayer,
    LatentAttention: LatentAttentionLayer,
    DeltaNet: DeltaNetLayer,
}


class Model(Protocol):
    """Serves an executor. A step is run once, by one of the first two methods."""

    def __call__(self, step: ModelInput, pool: LayerPools) -> Tensor:
        """Logits of the rows that sample: (S, vocab_size) float32. Writes keys and values."""
        ...

    def states(self, step: ModelInput, pool: LayerPools, rows: Tensor) -> Tensor:
        """The last layer's states after the final norm, of some of the T tokens: (R, hidden_size).
        rows: (R,) int64, which tokens, in any order. Writes keys and values."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """The logits of such states: (R, hidden_size) to (R, vocab_size) float32."""
        ...


class DecoderLayer:
    """One layer's parts, with their weights. group: of ranks whose outputs of the mixer and of the
    MLP add up to the layer's."""

    def __init__(self, config: Layer, reader: PartReader) -> None:
        self.config = config
        self.eps, self.group = reader.eps, reader.group
        self.norms = NormsLayer(config.norms, reader)
        self.mixer = _MIXERS[type(config.mixer)](config.mixer, reader)
        self.mlp = MLPLayer.read(config.mlp, reader)
        self.experts = ExpertsLayer.read(config.experts, reader)
        self.per_layer_input = PerLayerInputLayer.read(config.per_layer_input, reader)

    @property
    def parts(self) -> list[PartLayer[Any]]:
        """Those that it has, in the order of `Layer.parts`."""
        parts = (self.norms, self.mixer, self.mlp, self.experts, self.per_layer_input)
        return [part for part in parts if part is not None]

    @property
    def attention(self) -> AttentionLayer:
        """Returns the mixer of a layer that has attention to keys and values of its own heads."""
        assert isinstance(self.mixer, AttentionLayer), self.config
        return self.mixer

    def normed(self, residual: Tensor) -> Tensor:
        """Returns the mixer's input: (T, hidden_size)."""
        return normed(residual, self.norms.input_norm, self.eps)

    def go_on(
        self, index: int, residual: Tensor, mixed: Tensor, step: ModelInput, inputs: Tensor | None
    ) -> Tensor:
        """Returns the states after the layer, (T, hidden_size).

        index: which layer of the model it is. mixed: what the mixer gives, on this rank. inputs:
        its own of each token, (T, size), where the model has any.
        """
        mixed = summed(self.group, mixed)
        residual = residual + normed(mixed, self.norms.attended_norm, self.eps)
        residual = normed(residual, self.norms.attended_sum_norm, self.eps)
        x = normed(residual, self.norms.mlp_norm, self.eps)
        if self.mlp is None:
            assert self.experts is not None, "a layer has an MLP or experts"
            change = summed(self.group, self.experts(x))
        else:
            change = self.mlp(x, index, step)
            if self.experts is None:
                change = summed(self.group, change)
            else:
                change = self.experts.with_mlp(residual, change)
        residual = residual + normed(change, self.norms.active_norm, self.eps)
        residual = normed(residual, self.norms.active_sum_norm, self.eps)
        if self.per_layer_input is not None:
            assert inputs is not None, "the model makes the layers' inputs"
            residual = residual + self.per_layer_input(residual, inputs)
        scalar = self.norms.scalar
        return residual if scalar is None else residual * scalar


def read_layer(
    config: ModelConfig,
    weights: WeightSource,
    make_linear: MakeLinear,
    index: int,
    group: Group | None = None,
) -> DecoderLayer:
    reader = PartReader(weights, make_linear, config.norm, f"{LAYER}{index}.", group)
    return DecoderLayer(config.layers[index], reader)


class LlamaModel:
    """See `Model`. Of a stage before the last, the states and the logits have no rows: the next
    stage computes on."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        make_linear: MakeLinear,
        *,
        max_model_len: int,
        device: torch.device,
        num_load_threads: int = 1,
        shard: Shard | None = None,
        group: Group | None = None,
        maps_tables: bool = True,
        stage: Stage | None = None,
        pipeline: Pipeline | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """config: of the shard, where this rank has one, and of its stage. group: of the ranks with
        the others. stage, pipeline: both where there are several; all but the first stage have no
        embedding, and all but the last no output layer, or one without rows. dtype: of the states
        where there are several stages, and else that of the embedding. maps_tables: as of
        `PerLayerInputs`."""
        self.config = config
        self.shard = shard or Shard(config)
        self.group, self.pipeline = group, pipeline or Pipeline()
        self.stage = stage = stage or Stage(config, 0, 1)
        reader = PartReader(weights, make_linear, config.norm)
        read = partial(read_layer, config, weights, make_linear, group=group)
        with ThreadPoolExecutor(num_load_threads) as pool:
            self.layers = list(pool.map(read, range(config.num_layers)))
        self.per_layer_inputs = PerLayerInputsTable.read(
            config.per_layer_inputs, reader, maps_table=maps_tables
        )
        self._read_ends(reader, partial(torch.empty, dtype=dtype, device=device))
        attentions = (layer.attention for layer in config.layers)
        self.rotary = RotaryTables(attentions, max_model_len, device)

    @property
    def parts(self) -> Iterator[PartLayer[Any]]:
        """Those of all layers, and what makes the layers' own inputs."""
        if self.per_layer_inputs is not None:
            yield self.per_layer_inputs
        yield from (part for layer in self.layers for part in layer.parts)

    @property
    def step_weight_bytes(self) -> int:
        """As `ModelInfo.weight_bytes`: only the output layer reads a tied embedding."""
        ends = self.norm.nbytes + self.config.generates * self.lm_head.num_bytes
        return ends + sum(part.num_bytes for part in self.parts)

    @property
    def expert_bytes(self) -> int:
        return sum(part.expert_bytes for part in self.parts)

    def _read_ends(self, reader: PartReader, empty: Callable[..., Tensor]) -> None:
        """Reads the embedding, the final norm and the output layer, where the stage has them."""
        stage, config, head = self.stage, self.config, self.config.head
        has_table = stage.is_first or (stage.is_last and head.is_tied)
        table = config.embedding.linears["table"]
        self.embedding = reader.weight(table) if has_table else empty(0, config.hidden_size)
        self.sums = EmbeddedSums.read(config.embedding, reader) if stage.is_first else None
        has_norm = stage.is_last and head.has_norm
        self.norm = reader.vector(head.vectors["norm"]) if has_norm else empty(0)
        output = head.linears["output"]
        self.lm_head: Linear
        if not stage.is_last or config.is_encoder:
            self.lm_head = PlainLinear(self.embedding[:0], None)
        elif not head.is_tied:
            self.lm_head = reader.linear(output)
        else:
            # A packed one is in memory twice: the gather of input rows needs the plain matrix.
            quantized = reader.weights.quantized(output.shape, None, *output.names)
            self.lm_head = quantized or reader.make_linear(self.embedding, None)

    def __call__(self, step: ModelInput, pool: LayerPools) -> Tensor:
        return self.logits(self.states(step, pool, step.sample_rows))

    def logits(self, states: Tensor) -> Tensor:
        return scaled_logits(self.config.head, self.lm_head(states))

    def states(self, step: ModelInput, pool: LayerPools, rows: Tensor) -> Tensor:
        residual, embedded = self._begin(step)
        inputs: Sequence[Tensor | None] = [None] * len(self.layers)
        if (table := self.per_layer_inputs) is not None:
            inputs = table(step.token_ids_or(table.config.pad_id), embedded)
        angles = self.rotary.at(step.positions, step.angle_positions)
        steps = step.group_steps
        segments: Segments = segments_of(steps[-1]) if any(self.config.recurrent) else ()
        for index, layer in enumerate(self.layers):
            if self.group:
                self.group.doing.phase = f"layer {self.stage.layers.start + index}"
            x, mixer = layer.normed(residual), layer.mixer
            if isinstance(mixer, DeltaNetLayer):
                mixed = mixer(x, *pool.states(index), segments, step.adapters, index)
            else:
                own = steps[pool.group_of(index)]
                mixed = mixer(x, index, angles[index], *pool.layer(index), own)
            residual = layer.go_on(index, residual, mixed, step, inputs[index])
            if step.inserted is not None:
                residual = step.inserted.added(self.stage.layers.start + index, residual)
        if self.pipeline.after is not None:
            passed = (residual, embedded)[: num_passed(self.config)]
            num_rows, hidden = len(passed) * len(residual), self.config.hidden_size
            torch.cat(passed, out=self.pipeline.room(num_rows, hidden, residual.dtype))
            self.pipeline.send()
            return residual[:0]
        norm = self.norm if self.config.head.has_norm else None
        return normed(residual[rows], norm, self.config.norm.eps)

    def _begin(self, step: ModelInput) -> tuple[Tensor, Tensor]:
        """The states before the first layer that is here, and those before the model's first where
        per-layer inputs are made of them: (T, hidden_size) each."""
        pipeline, num_tokens = self.pipeline, len(step.token_ids)
        if pipeline.before is None:
            embedded = self.embedded(step)
            if (inserted := step.inserted) is not None:
                embedded = embedded.index_copy(0, inserted.at, inserted.rows.to(embedded.dtype))
            return embedded, embedded
        hidden, dtype = self.config.hidden_size, self.embedding.dtype
        received = pipeline.receive(num_passed(self.config) * num_tokens, hidden, dtype).clone()
        pipeline.taken()
        return received[:num_tokens], received[-num_tokens:]

    def embedded(self, step: ModelInput) -> Tensor:
        """What is embedded of a step's tokens: (T, hidden_size)."""
        embedded = self._embed(step.token_ids_or(0))
        return self.sums(embedded, step.positions, step.segments) if self.sums else embedded

    def _embed(self, token_ids: Tensor) -> Tensor:
        config = self.config.embedding
        if self.shard.size == 1:
            return embed(config, self.embedding, token_ids)
        own = token_ids - self.shard.first_id
        is_own = (own >= 0) & (own < len(self.embedding))
        states = embed(config, self.embedding, own.where(is_own, 0))
        return summed(self.group, states * is_own.unsqueeze(1))


class GatheredModel:
    """See `Model`: one of which each rank computes some columns of the logits. Rank 0 has them; on
    others they are zeros, which nobody should read."""

    def __init__(self, model: Model, group: Group, vocab_size: int) -> None:
        """vocab_size: of the whole model; the ranks' together may be a few more."""
        self._model = model
        self._group = group
        self._vocab_size = vocab_size

    def __call__(self, step: ModelInput, pool: LayerPools) -> Tensor:
        return gathered(self._group, self._model(step, pool), self._vocab_size)

    def states(self, step: ModelInput, pool: LayerPools, rows: Tensor) -> Tensor:
        return self._model.states(step, pool, rows)

    def logits(self, states: Tensor) -> Tensor:
        return gathered(self._group, self._model.logits(states), self._vocab_size)


def gathered(group: Group, part: Tensor, vocab_size: int) -> Tensor:
    """On rank 0 the logits of which each has a part, (S, vocab_size); on others zeros."""
    if not len(part):
        return part.new_empty(0, vocab_size)
    parts = group.gather(part)
    if parts is None:
        return part.new_zeros(len(part), vocab_size)
    return joined(parts, part.new_empty(len(part), vocab_size))


def joined(parts: Tensor, logits: Tensor) -> Tensor:
    """parts: (ranks, S, columns), of which the last may be padding. Writes logits, (S, vocab_size),
    and returns them."""
    columns = torch.split(logits, parts.shape[2], dim=1)
    for into, each in zip(columns, parts, strict=False):  # the last ranks may have none
        into.copy_(each[:, : into.shape[1]])
    return logits
