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

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.attention.protocol import DeviceAttention, RotatingAttention
from penstock.engine.device_step import AdapterTiles, DeviceStep, Rotation
from penstock.engine.kernels import per_layer_inputs
from penstock.engine.kernels.activation import silu_mul, softcap
from penstock.engine.kernels.gates import apply_gates, without_gates
from penstock.engine.kernels.linear import MAX_ROWS
from penstock.engine.kernels.norm import add_rms_norm, embed, rms_norm
from penstock.engine.kernels.rope import rotate_and_store
from penstock.engine.memory.kv_pool import LayerPools
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.fused_delta_net import FusedDeltaNet
from penstock.engine.models.fused_experts import FusedExperts, FusedSharedExpert
from penstock.engine.models.fused_linear import FUSED_LINEARS, FUSED_PATH, FusedLinear, product
from penstock.engine.models.gathered import joined
from penstock.engine.models.llama import Layer, LlamaModel, embedding_multiplier, normed_whole
from penstock.engine.models.lora.adapter import Stack
from penstock.engine.models.lora.slots import AdapterSlots
from penstock.engine.ranks.device_pipeline import DevicePipeline

# Of ModelConfig.
FEATURES = {
    *("tied_embeddings", "qkv_bias", "output_bias", "mlp_bias", "qk_norm", "whole_qk_norm"),
    *("pre_norms", "post_norms", "wide_norms", "norm_offset", "activation", "layer_ropes"),
    *("rotary_dim", "query_scaling", "attention_scale", "embedding_multiplier"),
    *("logit_multiplier", "experts", "attention_sinks", "clamped_swiglu"),
    *("delta_net", "attention_gates"),
    *("full_heads", "keys_are_values", "value_norm", "num_shared_kv_layers", "wide_shared_mlps"),
    *("layer_scalars", "per_layer_inputs", "logit_softcap"),
}
# Of these, those that come between the products that a step of few tokens fuses.
_BETWEEN_PRODUCTS = {
    *("pre_norms", "post_norms", "activation", "whole_qk_norm", "experts"),
    *("wide_shared_mlps", "layer_scalars", "per_layer_inputs"),
}


class _MLP(NamedTuple):
    gate_up: FusedLinear
    down: FusedLinear


class _PerLayerInput(NamedTuple):
    gate: FusedLinear
    projection: FusedLinear


class _Linears(NamedTuple):
    """One layer's. mlp: None where it has experts alone. delta_net: None where it has attention."""

    qkv: FusedLinear
    output: FusedLinear
    mlp: _MLP | None
    experts: FusedExperts | None
    per_layer_input: _PerLayerInput | None
    shared: FusedSharedExpert | None
    delta_net: FusedDeltaNet | None


class _Mixed(NamedTuple):
    """What attention gives, (T, num_heads, head_dim), by the head_dim; and what a recurrence, (T,
    values); None where no layer has one."""

    attended: dict[int, Tensor]
    recurred: Tensor | None


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
        model.config.check_features(FUSED_PATH, FEATURES)
        self._model = model
        self._pool = pool
        self._attention = attention
        self._adapters = adapters
        self._pipeline = pipeline
        self._linears = [_linears(model.config, layer) for layer in model.layers]
        # Those before the last one with attention here: after them come recurrent states, and what
        # other stages have alone.
        layers = enumerate(model.layers)
        groups = [pool.group_of(index) for index, layer in layers if layer.delta_net is None]
        self._num_attention_groups = 1 + max(groups, default=-1)
        self._lm_head = FUSED_LINEARS.of(model.lm_head)
        self._per_layer_inputs = None
        if model.per_layer_inputs is not None:
            self._per_layer_inputs = FUSED_LINEARS.of(model.per_layer_inputs.projection)
        self._fuses = not model.config.features & _BETWEEN_PRODUCTS
        self._multiplier = embedding_multiplier(model.config, model.embedding.dtype)
        # One buffer for the logits of all steps: a buffer for each graph would take gigabytes. A
        # stage before the last has none.
        vocab_size, embedding = self._lm_head.out_features, model.embedding
        self._logits = embedding.new_empty(max_rows, vocab_size)
        self._few_logits = embedding.new_empty(MAX_ROWS, vocab_size, dtype=torch.float32)
        self._of_all: dict[torch.dtype, Tensor] = {}
        if vocab_size and model.shard is not None and model.shard.rank == 0:
            whole = model.shard.model.vocab_size
            for part in (self._few_logits, self._logits):
                self._of_all[part.dtype] = part.new_empty(len(part), whole)

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph may hold a step."""
        return self._attention.is_capturable

    @property
    def takes_decode_lens(self) -> bool:
        """Whether it computes a step with `DeviceStep.decode_lens`."""
        return self._attention.takes_decode_lens

    @property
    def has_states(self) -> bool:
        """Whether layers have a recurrence, which reads `DeviceStep.state_tiles`."""
        return self._model.config.delta_net is not None

    @property
    def num_adapter_slots(self) -> int:
        return 0 if self._adapters is None else self._adapters.num_slots

    def __call__(self, step: DeviceStep) -> Tensor:
        """The last layer's states before the final norm, (T, hidden), of a stage's layers its
        last one's. Writes keys and values. Of a stage after the first, the states of the stage
        before have arrived, and are gone afterwards."""
        model, config = self._model, self._model.config
        num_tokens = len(step.token_ids)
        steps = step.of_groups
        for each in steps[: self._num_attention_groups]:
            self._attention.plan(each)
        if (pipeline := self._pipeline) is None or pipeline.before is None:
            residual = model.embedding.new_empty(num_tokens, config.hidden_size)
            mixed = self._mixed(step, residual)
            first_id = None if model.shard is None else model.shard.first_id
            embed(step.token_ids, model.embedding, residual, self._multiplier, first_id=first_id)
            self._summed(residual)
        else:
            residual = pipeline.arrived(num_tokens)
            mixed = self._mixed(step, residual)
        if self._fuses and num_tokens <= MAX_ROWS and step.adapters is None:
            self._fused(steps, residual, mixed)
        else:
            self._one_by_one(steps, residual, mixed, self._inputs(step, residual))
        return residual

    def logits(self, states: Tensor) -> Tensor:
        """Of some rows of what a call returned: (S, vocab_size), float32 or the model's type.

        Valid until the next call. Of several ranks, the first has them; the others get their own
        columns, which are of no use.
        """
        model, eps, num_rows = self._model, self._model.config.rms_norm_eps, len(states)
        if num_rows <= MAX_ROWS:
            out = self._few_logits[:num_rows]
            self._lm_head.few(states, out, norm=model.norm, eps=eps)
        else:
            out = self._lm_head.many(self.normed(states), self._logits[:num_rows])
        out = self._scaled(out)
        if (group := self._model.group) is None:
            return out
        parts = group.gather(out)
        return out if parts is None else joined(parts, self._of_all[out.dtype][:num_rows])

    def logits_of_normed(self, states: Tensor) -> Tensor:
        """Of states after the final norm: (S, vocab_size) float32; zeros but on the first rank."""
        out = self._scaled(self._lm_head.many(states).float())
        if (group := self._model.group) is None or self._model.shard is None:
            return out
        logits = out.new_zeros(len(out), self._model.shard.model.vocab_size)
        parts = group.gather(out)
        return logits if parts is None else joined(parts, logits)

    def _summed(self, tensor: Tensor) -> Tensor:
        """In place, over all ranks."""
        if (group := self._model.group) is not None:
            group.all_reduce(tensor)
        return tensor

    def _scaled(self, logits: Tensor) -> Tensor:
        config = self._model.config
        if config.logit_multiplier != 1:
            logits = logits.mul_(config.logit_multiplier)
        if config.logit_softcap is not None:
            softcap(logits, config.logit_softcap)
        return logits

    def normed(self, states: Tensor) -> Tensor:
        """After the final norm."""
        normed = torch.empty_like(states)
        rms_norm(states, self._model.norm, self._model.config.rms_norm_eps, normed)
        return normed

    def _inputs(self, step: DeviceStep, embedded: Tensor) -> Tensor | None:
        """The layers' own inputs of each token, (T, num_layers, size), where they have any."""
        inputs, projection = self._model.per_layer_inputs, self._per_layer_inputs
        if inputs is None or projection is None:
            return None
        projected = product(projection, embedded).view(len(embedded), *inputs.shape)
        eps = self._model.config.rms_norm_eps
        per_layer_inputs.add_table_rows(
            projected, step.token_ids, inputs.table, inputs.norm, eps, inputs.scale
        )
        return projected

    def _mixed(self, step: DeviceStep, residual: Tensor) -> _Mixed:
        """What every layer's attention or recurrence writes to.

        Tokens that only pad a graph belong to no row, so nothing is written for them, and they stay
        zeros. One buffer for all layers: zeroed in each, it would be an operation between two
        kernels that may overlap.
        """
        config, num_tokens = self._model.config, len(residual)
        make = residual.new_empty if step.decode_lens is None else residual.new_zeros
        head_dims = {layer.shape.heads.head_dim for layer in self._model.layers}
        net = config.delta_net
        return _Mixed(
            {size: make((num_tokens, config.num_heads, size)) for size in sorted(head_dims)},
            None if net is None else make((num_tokens, net.num_values)),
        )

    def _fused(self, steps: list[DeviceStep], residual: Tensor, mixed: _Mixed) -> None:
        config = self._model.config
        eps = config.rms_norm_eps
        active = residual.new_empty(len(residual), config.intermediate_size)
        # The sum over all ranks must have what was there before once.
        group = self._model.group
        before = residual if group is None or group.rank == 0 else None
        layers = zip(self._model.layers, self._linears, strict=True)
        for index, (layer, linears) in enumerate(layers):
            projected = residual.new_empty(len(residual), linears.qkv.out_features)
            linears.qkv.few(residual, projected, norm=layer.input_norm, eps=eps)
            if (net := linears.delta_net) is not None:
                gates = residual.new_empty(len(residual), net.gates.out_features)
                net.gates.few(residual, gates, norm=layer.input_norm, eps=eps)
                flat = self._recur(index, net, projected, gates, steps, mixed)
            else:
                flat = self._attend(index, layer, projected, steps, mixed)
            linears.output.few(flat, residual, residual=before)
            self._summed(residual)
            assert linears.mlp is not None
            linears.mlp.gate_up.few_gated(residual, active, norm=layer.mlp_norm, eps=eps)
            linears.mlp.down.few(active, residual, residual=before)
            self._summed(residual)

    def _one_by_one(
        self, steps: list[DeviceStep], residual: Tensor, mixed: _Mixed, inputs: Tensor | None
    ) -> None:
        """inputs: as `_inputs` gives them."""
        model, config = self._model, self._model.config
        eps, tiles = config.rms_norm_eps, steps[0].adapters
        # What the products read: without norms before them, the residual stream.
        normed = torch.empty_like(residual) if config.pre_norms else residual
        if (first := model.layers[0].input_norm) is not None:
            rms_norm(residual, first, eps, normed)
        for index, (layer, linears) in enumerate(zip(model.layers, self._linears, strict=True)):
            projected = self._adapted(index, Stack.QKV, linears.qkv, normed, tiles)
            if (net := linears.delta_net) is not None:
                gates = product(net.gates, normed)
                flat = self._recur(index, net, projected, gates, steps, mixed)
            else:
                flat = self._attend(index, layer, projected, steps, mixed)
            change = self._adapted(index, Stack.OUTPUT, linears.output, flat, tiles)
            self._summed(change)
            post = layer.attended_norm
            add_rms_norm(change, residual, layer.mlp_norm, eps, normed, post=post)
            change = self._through_mlp(index, layer, linears, residual, normed, tiles)
            post = layer.active_norm
            if inputs is not None:
                add_rms_norm(change, residual, None, eps, normed, post=post)
                change, post = self._of_input(index, layer, linears, residual, inputs)
            is_last = index + 1 == len(model.layers)
            following = None if is_last else model.layers[index + 1].input_norm
            if following is None and post is None and layer.scalar is None:
                residual += change
            else:
                add_rms_norm(
                    change, residual, following, eps, normed, post=post, scalar=layer.scalar
                )

    def _through_mlp(
        self,
        index: int,
        layer: Layer,
        linears: _Linears,
        residual: Tensor,
        normed: Tensor,
        tiles: AdapterTiles | None,
    ) -> Tensor:
        """What the MLP, the experts, or both make of a layer's states, on all ranks together.
        normed: after their norm."""
        experts = linears.experts
        if linears.mlp is None:
            assert experts is not None
            change = experts(normed)
            if linears.shared is not None:
                linears.shared.add(normed, change)
            return self._summed(change)
        is_gelu, eps = self._model.config.activation == "gelu_tanh", self._model.config.rms_norm_eps
        both = self._adapted(index, Stack.GATE_UP, linears.mlp.gate_up, normed, tiles)
        active = both.new_empty(len(both), both.shape[1] // 2)
        silu_mul(both, active, is_gelu=is_gelu)
        change = self._adapted(index, Stack.DOWN, linears.mlp.down, active, tiles)
        beside = layer.beside
        if beside is None or experts is None:
            return self._summed(change)
        routed, x = torch.empty_like(residual), torch.empty_like(residual)
        rms_norm(residual, beside.router_norm, eps, routed)
        rms_norm(residual, beside.input_norm, eps, x)
        of_experts = experts(x, routed)
        if self._model.group is not None:  # one sum for both
            change, of_experts = self._summed(torch.stack((change, of_experts)))
        rms_norm(change, beside.mlp_norm, eps, change)
        add_rms_norm(of_experts, change, None, eps, x, post=beside.output_norm)
        return change

    def _of_input(
        self, index: int, layer: Layer, linears: _Linears, residual: Tensor, inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What a layer makes of its own input of each token, and the norm of that."""
        assert linears.per_layer_input is not None and layer.per_layer_input is not None
        gate = product(linears.per_layer_input.gate, residual)
        per_layer_inputs.gate_input(gate, inputs, index)
        return product(linears.per_layer_input.projection, gate), layer.per_layer_input.norm

    def _adapted(
        self, index: int, stack: Stack, linear: FusedLinear, x: Tensor, tiles: AdapterTiles | None
    ) -> Tensor:
        """Of a linear layer, with what the adapters of the tokens add. index: of its layer."""
        out = product(linear, x)
        if tiles is not None:
            assert self._adapters is not None
            self._adapters.add(index, stack, x, out, tiles)
        return out

    def _recur(
        self,
        index: int,
        net: FusedDeltaNet,
        projected: Tensor,
        gates: Tensor,
        steps: list[DeviceStep],
        mixed: _Mixed,
    ) -> Tensor:
        """What the output layer reads, (T, values), after a recurrence."""
        step = steps[self._pool.group_of(index)]
        assert mixed.recurred is not None, index
        net(projected, gates, step, *self._pool.states(index), mixed.recurred)
        return mixed.recurred

    def _attend(
        self, index: int, layer: Layer, projected: Tensor, steps: list[DeviceStep], mixed: _Mixed
    ) -> Tensor:
        """What the output layer reads, (T, num_heads * head_dim), in the layer's buffer. steps: the
        step, as each group of layers sees it."""
        config = self._model.config
        out = mixed.attended[layer.shape.heads.head_dim]
        if not config.attention_gates:
            self._attend_ungated(index, layer, projected, steps, out)
            return out.flatten(1)
        qkv = without_gates(projected, config.num_heads, config.head_dim)
        self._attend_ungated(index, layer, qkv, steps, out)
        apply_gates(projected, out)
        return out.flatten(1)

    def _attend_ungated(
        self, index: int, layer: Layer, projected: Tensor, steps: list[DeviceStep], mixed: Tensor
    ) -> None:
        """Writes attention's output to `mixed`."""
        step = steps[self._pool.group_of(index)]
        config, angles = self._model.config, self._model.rotary.layers[index]
        keys, values = self._pool.layer(index)
        query_norm, key_norm = layer.query_norm, layer.key_norm
        if config.whole_qk_norm and query_norm is not None and key_norm is not None:
            sizes = [len(query_norm), len(key_norm)]
            query, key = torch.split(projected[:, : sum(sizes)], sizes, dim=1)
            if layer.group is None:
                for weight, columns in ((query_norm, query), (key_norm, key)):
                    rms_norm(columns, weight, config.rms_norm_eps, columns)
            else:
                of_all = normed_whole(layer, query, key, config.rms_norm_eps)
                for columns, normed in zip((query, key), of_all, strict=True):
                    columns.copy_(normed)
            query_norm = key_norm = None
        rotation = Rotation(
            cos=angles.cos,
            sin=angles.sin,
            query_norm=query_norm,
            key_norm=key_norm,
            eps=config.rms_norm_eps,
            query_factors=angles.query_factors,
            rotary_dim=angles.rotary_dim,
            kv_parts=len(layer.shape.qkv) - 1,
            norms_values=config.value_norm,
        )
        if step.chunk_starts is None and isinstance(self._attention, RotatingAttention):
            self._attention.rotated(
                projected, rotation, keys, values, step, layer.window, mixed, layer.sinks
            )
            return
        query = torch.empty_like(mixed)
        rotate_and_store(
            projected,
            step.positions,
            step.kv_slots,
            rotation.cos,
            rotation.sin,
            rotation.query_norm,
            rotation.key_norm,
            rotation.eps,
            keys,
            values,
            query,
            rotation.query_factors,
            rotation.rotary_dim,
            kv_parts=rotation.kv_parts,
            norms_values=rotation.norms_values,
        )
        self._attention(query, keys, values, step, layer.window, mixed, layer.sinks)


def _linears(config: ModelConfig, layer: Layer) -> _Linears:
    """Raises UnsupportedWeightFormat."""
    of = FUSED_LINEARS.of
    mlp = experts = own = shared = delta_net = None
    if layer.router is None:
        mlp = _MLP(of(layer.gate_up), of(layer.down))
    else:
        assert config.experts is not None
        linears = (layer.router, layer.gate_up, layer.down)
        experts = FusedExperts(config.experts, *linears, config.clamped_swiglu)
    if (beside := layer.beside) is not None:
        linears = (beside.router, beside.gate_up, beside.down)
        is_gelu = config.activation == "gelu_tanh"
        experts = FusedExperts(beside.experts, *linears, is_gelu=is_gelu, factors=beside.factors)
    if layer.per_layer_input is not None:
        gate, projection = layer.per_layer_input.gate, layer.per_layer_input.projection
        own = _PerLayerInput(of(gate), of(projection))
    if layer.shared is not None:
        shared = FusedSharedExpert(layer.shared)
    if layer.delta_net is not None:
        delta_net = FusedDeltaNet(layer.delta_net)
    return _Linears(of(layer.qkv), of(layer.output), mlp, experts, own, shared, delta_net)
