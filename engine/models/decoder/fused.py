"""`FusedModel`: the layers of `LlamaModel` on a GPU, with few kernel launches.

A layer is computed in one of two ways. With few tokens (`skinny_linear`): five launches, each
matrix product fused with what surrounds it, since at batch 1 launches cost as much as reading the
weights. With more tokens: cuBLAS for the products, and one kernel for everything between two of
them; so too, but without cuBLAS, are few tokens computed in families that have more between two
products than Llama, and in steps in which tokens have LoRA adapters. In both ways, a step of
decodes alone leaves the rotation to an attention that does it itself.

Where several ranks have a part of every layer, their sums come after the embedding, attention and
the MLP, and rank 0 gathers the columns of the logits. Of several stages, all but the first go on
with the states that they have received.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.kernels.activation import silu_mul, softcap
from penstock.engine.kernels.attention.protocol import DeviceAttention
from penstock.engine.kernels.linear import MAX_ROWS, Scaled
from penstock.engine.kernels.norm import add_rms_norm, embed, rms_norm
from penstock.engine.memory.pool.kv_pool import LayerPools
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.decoder.model import LlamaModel, gathered, joined
from penstock.engine.models.layers.fused_linear import (
    FUSED_PATH,
    FusedLinear,
    fused_linear,
    product,
)
from penstock.engine.models.lora.slots import AdapterSlots
from penstock.engine.models.parts.attention.config import Attention
from penstock.engine.models.parts.attention.gpu import FusedAttention
from penstock.engine.models.parts.attention.rotary import Angles
from penstock.engine.models.parts.delta_net.config import DeltaNet
from penstock.engine.models.parts.delta_net.gpu import FusedDeltaNet
from penstock.engine.models.parts.experts.config import Experts
from penstock.engine.models.parts.experts.gpu import FusedExperts
from penstock.engine.models.parts.latent_attention.config import LatentAttention
from penstock.engine.models.parts.latent_attention.gpu import FusedLatentAttention
from penstock.engine.models.parts.layer import Layer
from penstock.engine.models.parts.mlp.config import MLP
from penstock.engine.models.parts.norm.config import Norms
from penstock.engine.models.parts.per_layer_inputs.config import PerLayerInput
from penstock.engine.models.parts.per_layer_inputs.gpu import (
    FusedPerLayerInput,
    FusedPerLayerInputs,
)
from penstock.engine.models.parts.tensors import Part, Stack
from penstock.engine.models.parts.vocabulary.layer import multiplier
from penstock.engine.ranks.device_pipeline import DevicePipeline
from penstock.engine.step.device_step import AdapterTiles, DeviceStep
from penstock.engine.step.model_input import InsertedRows


class FusedMixer(Protocol):
    """Mixes the tokens of one layer. It waits for nothing, so a CUDA graph may hold it.

    projections: the products of the layer's states that it reads, which adapters change as
    `_PROJECTIONS`. output: the product of what it gives. out_shape: of what it writes for a token.
    """

    projections: list[FusedLinear]
    output: FusedLinear
    out_shape: tuple[int, ...]

    def __call__(self, projected: list[Tensor], step: DeviceStep, out: Tensor) -> Tensor:
        """Returns the output product's input, (T, columns), in the memory of out, (T, *out_shape),
        or made of it; of tokens that only pad a graph zeros, as out has them.

        projected: what the projections give. step: as the layer's group sees it.
        """
        ...


# By the settings of what mixes a layer's tokens; made from its layer, the pool, the layer's index,
# and for attention the angles of its heads and the backend.
_MIXERS: Mapping[
    type[Part], Callable[[Any, LayerPools, int, Angles | None, DeviceAttention], FusedMixer]
] = {Attention: FusedAttention, LatentAttention: FusedLatentAttention, DeltaNet: FusedDeltaNet}
_PROJECTIONS = (Stack.QKV, Stack.GATES)
# The parts that it computes.
_PARTS = {*_MIXERS, MLP, Experts, Norms, PerLayerInput}


def check_parts(config: ModelConfig) -> None:
    """Raises UnsupportedFeature."""
    config.check_parts(
        FUSED_PATH, lambda part: () if type(part) in _PARTS else (type(part).__name__,)
    )


def _fuses(layer: Layer) -> bool:
    """Whether nothing comes between the products that a step of few tokens fuses."""
    others = (layer.experts, layer.per_layer_input, layer.norms.has_scalar)
    is_plain = layer.attention is None or not layer.attention.norms_whole
    has_norms = layer.norms.pre and not layer.norms.post
    is_silu = layer.mlp is not None and not layer.mlp.activation.is_gelu
    return is_plain and has_norms and is_silu and not any(others)


class _FusedLayer:
    """One layer's parts. group: whose block tables it has."""

    def __init__(
        self, model: LlamaModel, index: int, pool: LayerPools, attention: DeviceAttention
    ) -> None:
        """Raises UnsupportedWeightFormat."""
        layer, angles = model.layers[index], model.rotary.layers.get(index)
        self.norms, self.group = layer.norms, pool.group_of(index)
        make = _MIXERS[type(layer.config.mixer)]
        self.mixer = make(layer.mixer, pool, index, angles, attention)
        self.mlp = layer.mlp
        if layer.mlp is not None:
            self.gate_up = fused_linear(layer.mlp.gate_up)
            self.down = fused_linear(layer.mlp.down)
        self.experts = None if layer.experts is None else FusedExperts(layer.experts)
        own = layer.per_layer_input
        self.per_layer_input = None if own is None else FusedPerLayerInput(own)


class FusedModel:
    """Owns no weights: it computes with those of a `LlamaModel`."""

    def __init__(
        self,
        model: LlamaModel,
        pool: LayerPools,
        attention: DeviceAttention,
        max_rows: int,
        adapters: AdapterSlots | None = None,
        pipeline: DevicePipeline | None = None,
    ) -> None:
        """max_rows: the most that sample in one step. adapters: None where no token has one.
        pipeline: where the model has some of the layers.

        Raises UnsupportedFeature or UnsupportedWeightFormat.
        """
        check_parts(model.config)
        self._model = model
        self.attention = attention
        self._adapters = adapters
        self._pipeline = pipeline or DevicePipeline()
        self._layers = [
            _FusedLayer(model, index, pool, attention) for index in range(len(model.layers))
        ]
        # Those before the last one with attention here: after them come recurrent states, and what
        # other stages have alone.
        groups = [self._layers[index].group for index in model.rotary.layers]
        self._num_attention_groups = 1 + max(groups, default=-1)
        tables = {*model.rotary.layers.values()}
        # All layers with attention have it, where images have positions of their own.
        self._angles = next((table for table in tables if table.axes is not None), None)
        assert self._angles is None or len(tables) == 1, tables
        self._lm_head = fused_linear(model.lm_head)
        inputs = model.per_layer_inputs
        self._inputs = (
            None if inputs is None else FusedPerLayerInputs(inputs, model.config.norm.eps)
        )
        # A state times a norm's weight may be more than float16 holds before its factor.
        is_wide = model.embedding.dtype is not torch.float16
        self._fuses = is_wide and all(map(_fuses, set(model.config.layers)))
        self._multiplier = multiplier(model.config.embedding, model.embedding.dtype)
        self._make_logits(max_rows)

    def _make_logits(self, max_rows: int) -> None:
        """Makes one buffer for the logits of all steps: a buffer for each graph would take
        gigabytes. A stage before the last has none."""
        model = self._model
        vocab_size, embedding = self._lm_head.out_features, model.embedding
        self._logits = embedding.new_empty(max_rows, vocab_size)
        self._few_logits = embedding.new_empty(MAX_ROWS, vocab_size, dtype=torch.float32)
        self._of_all: dict[torch.dtype, Tensor] = {}
        if vocab_size and model.group is not None and model.group.rank == 0:
            whole = model.shard.model.vocab_size
            for part in (self._few_logits, self._logits):
                self._of_all[part.dtype] = part.new_empty(len(part), whole)

    @property
    def has_states(self) -> bool:
        """Whether layers have a recurrence, which reads `DeviceStep.state_tiles`."""
        return any(self._model.config.recurrent)

    @property
    def num_adapter_slots(self) -> int:
        return 0 if self._adapters is None else self._adapters.num_slots

    def __call__(self, step: DeviceStep) -> Tensor:
        """The last layer's states before the final norm, (T, hidden), of a stage's layers its
        last one's. Writes keys and values. Of a stage after the first, the states of the stage
        before have arrived, and are gone afterwards."""
        model, config = self._model, self._model.config
        num_tokens, inserted = len(step.token_ids), step.inserted
        if self._angles is not None and step.angle_positions is not None:
            found = self._angles.at(step.positions, step.angle_positions)
            rows = torch.arange(num_tokens, dtype=torch.int32, device=step.positions.device)
            angles = found.cos.contiguous(), found.sin.contiguous()
            step = replace(step, angles=angles, rotary_positions=rows)
        steps = step.group_steps
        for each in steps[: self._num_attention_groups]:
            self.attention.plan(each)
        if self._pipeline.before is None:
            residual = model.embedding.new_empty(num_tokens, config.hidden_size)
            mixed = self._mixed(step, residual)
            first_id = None if model.group is None else model.shard.first_id
            ids = step.token_ids_or(0)
            embed(ids, model.embedding, residual, self._multiplier, first_id=first_id)
            self._summed(residual)
            if inserted is not None:
                residual.index_copy_(0, inserted.at, inserted.rows.to(residual.dtype))
        else:
            residual = self._pipeline.arrived(num_tokens)
            mixed = self._mixed(step, residual)
        are_plain = step.adapters is None and inserted is None
        if self._fuses and num_tokens <= MAX_ROWS and are_plain:
            self._fused(steps, residual, mixed)
        else:
            inputs = None
            if self._inputs is not None:
                inputs = self._inputs(step.token_ids_or(self._inputs.pad_id), residual)
            self._one_by_one(steps, residual, mixed, inputs)
        return residual

    def logits(self, states: Tensor) -> Tensor:
        """Computes logits of rows of a call's result: (S, vocab_size), float32 or the model's type.

        Valid until the next call. Of several ranks, the first has them; the others get their own
        columns, which are of no use.
        """
        num_rows = len(states)
        if num_rows <= MAX_ROWS:
            out = self._few_logits[:num_rows]
            self._lm_head.few(self.normed(states), out)
        else:
            out = self._lm_head.many(self.normed(states), self._logits[:num_rows])
        out = self._scaled(out)
        if (group := self._model.group) is None:
            return out
        parts = group.gather(out)
        return out if parts is None else joined(parts, self._of_all[out.dtype][:num_rows])

    def logits_of_normed(self, states: Tensor) -> Tensor:
        """Computes (S, vocab_size) float32 of states after the final norm; zeros but on rank 0."""
        out = self._scaled(self._lm_head.many(states).float())
        if (group := self._model.group) is None:
            return out
        return gathered(group, out, self._model.shard.model.vocab_size)

    def _summed(self, tensor: Tensor) -> Tensor:
        """In place, over all ranks."""
        if (group := self._model.group) is not None:
            group.all_reduce(tensor)
        return tensor

    def _scaled(self, logits: Tensor) -> Tensor:
        head = self._model.config.head
        if head.multiplier != 1:
            logits = logits.mul_(head.multiplier)
        if head.softcap is not None:
            softcap(logits, head.softcap)
        return logits

    def normed(self, states: Tensor) -> Tensor:
        """After the final norm."""
        return self._normed(states, self._model.norm)

    def _normed(self, states: Tensor, norm: Tensor | None) -> Tensor:
        assert norm is not None, "see _fuses"
        normed = torch.empty_like(states)
        rms_norm(states, norm, self._model.config.norm.eps, normed)
        return normed

    def _mixed(self, step: DeviceStep, residual: Tensor) -> dict[tuple[int, ...], Tensor]:
        """Returns what the mixers of all layers write to, by their `out_shape`.

        Tokens that only pad a graph belong to no row, so nothing is written for them, and they stay
        zeros. One buffer for all layers: zeroed in each, it would be an operation between two
        kernels that may overlap.
        """
        make = residual.new_empty if step.decode_lens is None else residual.new_zeros
        shapes = {layer.mixer.out_shape for layer in self._layers}
        return {shape: make((len(residual), *shape)) for shape in sorted(shapes)}

    def _fused(
        self, steps: list[DeviceStep], residual: Tensor, mixed: dict[tuple[int, ...], Tensor]
    ) -> None:
        eps, layers = self._model.config.norm.eps, self._layers
        x: Tensor | Scaled = self._normed(residual, layers[0].norms.input_norm)
        for index, layer in enumerate(layers):
            projected = []
            for linear in layer.mixer.projections:
                projected.append(residual.new_empty(len(residual), linear.out_features))
                linear.few(x, projected[-1], eps=eps)
            flat = layer.mixer(projected, steps[layer.group], mixed[layer.mixer.out_shape])
            x = self._added(layer.mixer.output, flat, residual, layer.norms.mlp_norm)
            assert layer.mlp is not None, index
            active = residual.new_empty(len(residual), layer.mlp.config.size)
            layer.gate_up.few_gated(x, active, eps=eps)
            is_last = index + 1 == len(layers)
            following = None if is_last else layers[index + 1].norms.input_norm
            x = self._added(layer.down, active, residual, following)

    def _added(
        self, linear: FusedLinear, x: Tensor, residual: Tensor, norm: Tensor | None
    ) -> Tensor | Scaled:
        """Adds a product to the states. Returns what the next product reads, after this norm;
        without one, nothing reads it."""
        group = self._model.group
        if group is None:
            return linear.few(x, residual, residual=residual, following=norm) or residual
        # The sum over all ranks must have what was there before once.
        linear.few(x, residual, residual=residual if group.rank == 0 else None)
        group.all_reduce(residual)
        return residual if norm is None else self._normed(residual, norm)

    def _one_by_one(
        self,
        steps: list[DeviceStep],
        residual: Tensor,
        mixed: dict[tuple[int, ...], Tensor],
        inputs: Tensor | None,
    ) -> None:
        """inputs: as `FusedPerLayerInputs` gives them."""
        layers, eps, tiles = self._layers, self._model.config.norm.eps, steps[0].adapters
        first = layers[0].norms.input_norm
        # The products read this: without norms before them, the residual stream.
        normed = residual if first is None else torch.empty_like(residual)
        if first is not None:
            rms_norm(residual, first, eps, normed)
        for index, layer in enumerate(layers):
            norms, mixer = layer.norms, layer.mixer
            projected = [
                self._adapted(index, stack, linear, normed, tiles)
                for stack, linear in zip(_PROJECTIONS, mixer.projections, strict=False)
            ]
            flat = mixer(projected, steps[layer.group], mixed[mixer.out_shape])
            change = self._adapted(index, Stack.OUTPUT, mixer.output, flat, tiles)
            self._summed(change)
            post = norms.attended_norm
            add_rms_norm(change, residual, norms.mlp_norm, eps, normed, post=post)
            change = self._through_mlp(index, layer, residual, normed, tiles)
            post = norms.active_norm
            if inputs is not None and layer.per_layer_input is not None:
                add_rms_norm(change, residual, None, eps, normed, post=post)
                change = layer.per_layer_input(index, residual, inputs)
                post = layer.per_layer_input.norm
            is_last = index + 1 == len(layers)
            following = None if is_last else layers[index + 1].norms.input_norm
            if following is None and post is None and norms.scalar is None:
                residual += change
            else:
                add_rms_norm(
                    change, residual, following, eps, normed, post=post, scalar=norms.scalar
                )
            if steps[0].inserted is not None:
                self._deepen(index, steps[0].inserted, residual, following, normed)

    def _deepen(
        self,
        index: int,
        inserted: InsertedRows,
        residual: Tensor,
        following: Tensor | None,
        normed: Tensor,
    ) -> None:
        """Adds to the states after a layer, in place, what inserted rows have for it. following,
        normed: the norm of what reads them next, and its result."""
        deepened = inserted.added(self._model.stage.layers.start + index, residual)
        if deepened is not residual:
            residual.copy_(deepened)
            if following is not None:
                rms_norm(residual, following, self._model.config.norm.eps, normed)

    def _through_mlp(
        self,
        index: int,
        layer: _FusedLayer,
        residual: Tensor,
        normed: Tensor,
        tiles: AdapterTiles | None,
    ) -> Tensor:
        """Applies the MLP, the experts, or both to a layer's states, on all ranks together.
        normed: after their norm."""
        mlp = layer.mlp
        if mlp is None:
            assert layer.experts is not None, index
            return self._summed(layer.experts(normed))
        both = self._adapted(index, Stack.GATE_UP, layer.gate_up, normed, tiles)
        active = both.new_empty(len(both), both.shape[1] // 2)
        silu_mul(both, active, is_gelu=mlp.config.activation.is_gelu)
        change = self._adapted(index, Stack.DOWN, layer.down, active, tiles)
        if layer.experts is None:
            return self._summed(change)
        return layer.experts.with_mlp(residual, change)

    def _adapted(
        self, index: int, stack: Stack, linear: FusedLinear, x: Tensor, tiles: AdapterTiles | None
    ) -> Tensor:
        """Applies a linear layer and the adapters of the tokens. index: of its layer."""
        out = product(linear, x)
        if tiles is not None:
            assert self._adapters is not None
            self._adapters.add(index, stack, x, out, tiles)
        return out
