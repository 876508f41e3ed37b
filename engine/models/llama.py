"""Llama and the families like it: one architecture, in which they differ by flags of ModelConfig.

All tokens of a step are one (T, hidden_size) tensor, whichever sequences they belong to; only
attention distinguishes them. The output layer gets only the rows that sample, and those of prompts
whose logprobs were requested.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.attention.protocol import Attention
from penstock.engine.memory.kv_codes import KVPages, store
from penstock.engine.memory.kv_pool import LayerPools
from penstock.engine.model_input import ModelInput
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.delta_net import DeltaNetConfig
from penstock.engine.models.experts import (
    SHARED_DOWN,
    SHARED_GATE,
    SHARED_GATE_UP,
    ExpertsConfig,
)
from penstock.engine.models.layer_shape import LayerShape
from penstock.engine.models.layers.delta_net import (
    DeltaNet,
    Recurrence,
    Segments,
    segments_of,
    torch_recurrence,
)
from penstock.engine.models.layers.experts import SharedExpert, clamped_swiglu, mixed
from penstock.engine.models.layers.gemma4 import (
    ExpertsBeside,
    PerLayerInput,
    PerLayerInputs,
)
from penstock.engine.models.layers.linear import (
    Linear,
    MakeLinear,
    PlainLinear,
    read_linear,
    tensor_bytes,
)
from penstock.engine.models.layers.norm import rms_norm, unit_norm
from penstock.engine.models.layers.rotary import Angles, RotaryTables, rotate
from penstock.engine.models.lora.adapter import Stack, adapted
from penstock.engine.models.shard import Shard
from penstock.engine.models.stage import Stage, num_passed
from penstock.engine.models.weights import WeightSource
from penstock.engine.ranks.group import Group
from penstock.engine.ranks.pipeline import Pipeline


class Model(Protocol):
    """What an executor needs of a model. A step is run once, by one of the first two."""

    def __call__(self, step: ModelInput, pool: LayerPools) -> Tensor:
        """Logits of the rows that sample: (S, vocab_size) float32. Writes keys and values."""
        ...

    def states(self, step: ModelInput, pool: LayerPools, rows: Tensor) -> Tensor:
        """The last layer's states after the final norm, of some of the T tokens: (R, hidden_size).

        rows: (R,) int64, which tokens, in any order. Writes keys and values.
        """
        ...

    def logits(self, states: Tensor) -> Tensor:
        """The logits of such states: (R, hidden_size) to (R, vocab_size) float32."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's weights; qkv and gate_up are stacked, so that each is one matrix product.

    Norms are None where the family has none. input_norm and mlp_norm are of what attention and the
    MLP read; attended_norm and active_norm of what they give, before it is added. router: None
    where the layer has one MLP; otherwise gate_up and down are those of all experts, one after the
    other: (experts * 2 * size, hidden_size) and (experts * hidden_size, size). sinks: see
    `Attention`. group: of ranks whose outputs of attention and of the MLP add up to the layer's.
    shared: the expert that computes every token, or None. delta_net: None where the layer has
    attention; otherwise qkv are the inputs of its convolution and its output gates. beside,
    per_layer_input, scalar: of Gemma 4; the last multiplies what the layer gives, (1,).
    """

    input_norm: Tensor | None
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    attended_norm: Tensor | None
    mlp_norm: Tensor | None
    router: Linear | None
    gate_up: Linear
    down: Linear
    active_norm: Tensor | None
    sinks: Tensor | None
    window: int | None
    shape: LayerShape
    group: Group | None
    shared: SharedExpert | None
    delta_net: DeltaNet | None
    beside: ExpertsBeside | None
    per_layer_input: PerLayerInput | None
    scalar: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Without experts."""
        linears: list[Linear] = [self.qkv, self.output]
        linears += [self.gate_up, self.down] if self.router is None else [self.router]
        of_heads = (self.query_norm, self.key_norm)
        norms = (self.input_norm, self.attended_norm, self.mlp_norm, self.active_norm, *of_heads)
        parts = (self.shared, self.delta_net, self.beside, self.per_layer_input)
        others = [part for part in parts if part is not None]
        return sum(part.num_bytes for part in (*linears, *others)) + tensor_bytes(
            *norms, self.sinks, self.scalar
        )

    @property
    def expert_bytes(self) -> int:
        """Of all experts."""
        if self.beside is not None:
            return self.beside.expert_bytes
        return 0 if self.router is None else self.gate_up.num_bytes + self.down.num_bytes


class LlamaModel:
    """See `Model`.

    Of a stage before the last, the states and the logits have no rows: the next stage computes on.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        make_linear: MakeLinear,
        attention: Attention,
        *,
        max_model_len: int,
        device: torch.device,
        num_load_threads: int = 1,
        shard: Shard | None = None,
        group: Group | None = None,
        recurrence: Recurrence = torch_recurrence,
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
        self.shard, self.group, self.pipeline = shard, group, pipeline
        self.first_layer = 0 if stage is None else stage.layers.start
        is_first = stage is None or stage.is_first
        is_last = stage is None or stage.is_last
        has_embedding = is_first or (is_last and config.tied_embeddings)
        self._attention = attention
        self._recurrence = recurrence
        hidden, vocab = config.hidden_size, config.vocab_size
        with ThreadPoolExecutor(num_load_threads) as pool:
            self.embedding = torch.empty(0, hidden, dtype=dtype, device=device)
            if has_embedding:
                self.embedding = weights.read((vocab, hidden), "model.embed_tokens.weight")
            layers = pool.map(
                lambda index: read_layer(config, weights, make_linear, index, group),
                range(config.num_layers),
            )
            self.layers = list(layers)
        self.norm = torch.empty(0, dtype=dtype, device=device)
        if is_last:
            self.norm = read_norm(config, weights, hidden, "model.norm.weight")
        self.per_layer_inputs = PerLayerInputs.read(
            config, weights, make_linear, maps_table=maps_tables
        )
        # An output layer that is packed and tied to the embedding is in memory twice: the gather of
        # input rows needs the plain matrix.
        self.lm_head: Linear
        if not is_last:
            self.lm_head = PlainLinear(self.embedding[:0], None)
        elif config.tied_embeddings:
            quantized = weights.quantized((vocab, hidden), None, "lm_head")
            self.lm_head = quantized or make_linear(self.embedding, None)
        else:
            self.lm_head = read_linear(weights, make_linear, vocab, hidden, "lm_head")
        layer_bytes = sum(layer.num_bytes for layer in self.layers)
        # As `ModelInfo.weight_bytes`: only the output layer reads a tied embedding.
        self.step_weight_bytes = layer_bytes + self.norm.nbytes + self.lm_head.num_bytes
        if self.per_layer_inputs is not None:
            self.step_weight_bytes += self.per_layer_inputs.num_bytes
        self.expert_bytes = sum(layer.expert_bytes for layer in self.layers)
        self.rotary = RotaryTables(config, max_model_len, device)

    def __call__(self, step: ModelInput, pool: LayerPools) -> Tensor:
        return self.logits(self.states(step, pool, step.sample_rows))

    def logits(self, states: Tensor) -> Tensor:
        return scaled_logits(self.config, self.lm_head(states))

    def states(self, step: ModelInput, pool: LayerPools, rows: Tensor) -> Tensor:
        residual, embedded = self._begin(step)
        inputs: Sequence[Tensor | None] = [None] * len(self.layers)
        if self.per_layer_inputs is not None:
            inputs = self.per_layer_inputs(step.token_ids, embedded)
        angles, steps = self.rotary.at(step.positions), step.of_groups
        segments: Segments = segments_of(steps[-1]) if self.config.delta_net else ()
        for index, layer in enumerate(self.layers):
            if self.group:
                self.group.doing.phase = f"layer {self.first_layer + index}"
            if layer.delta_net is not None:
                x = _normed(residual, layer.input_norm, self.config.rms_norm_eps)
                mixed = _recur(
                    layer, layer.delta_net, self._recurrence, x, *pool.states(index), segments
                )
                mixed = summed(layer.group, mixed)
                residual = _through_mlp(
                    self.config, layer, index, residual + mixed, step, inputs[index]
                )
                continue
            keys, values = pool.layer(index)
            own = steps[pool.group_of(index)]
            residual = run_layer(
                self.config,
                layer,
                index,
                self._attention,
                residual,
                angles[index],
                keys,
                values,
                own,
                inputs[index],
            )
        if self.pipeline is not None and self.pipeline.after is not None:
            passed = (residual, embedded)[: num_passed(self.config)]
            num_rows, hidden = len(passed) * len(residual), self.config.hidden_size
            torch.cat(passed, out=self.pipeline.room(num_rows, hidden, residual.dtype))
            self.pipeline.send()
            return residual[:0]
        return rms_norm(residual[rows], self.norm, self.config.rms_norm_eps)

    def _begin(self, step: ModelInput) -> tuple[Tensor, Tensor]:
        """The states before the first layer that is here, and those before the model's first where
        per-layer inputs are made of them: (T, hidden_size) each."""
        pipeline, num_tokens = self.pipeline, len(step.token_ids)
        if pipeline is None or pipeline.before is None:
            embedded = self._embed(step.token_ids)
            return embedded, embedded
        hidden, dtype = self.config.hidden_size, self.embedding.dtype
        received = pipeline.receive(num_passed(self.config) * num_tokens, hidden, dtype).clone()
        pipeline.taken()
        return received[:num_tokens], received[-num_tokens:]

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self.shard is None:
            return embed(self.config, self.embedding, token_ids)
        own = token_ids - self.shard.first_id
        is_own = (own >= 0) & (own < len(self.embedding))
        states = embed(self.config, self.embedding, own.where(is_own, 0))
        return summed(self.group, states * is_own.unsqueeze(1))


def embed(config: ModelConfig, embedding: Tensor, token_ids: Tensor) -> Tensor:
    """The states before the first layer: (T, hidden_size)."""
    states = functional.embedding(token_ids, embedding)
    if config.embedding_multiplier == 1:
        return states
    return states * embedding_multiplier(config, embedding.dtype)


def embedding_multiplier(config: ModelConfig, dtype: torch.dtype) -> float:
    """Rounded to the type of the states, as Gemma was trained."""
    return float(torch.tensor(config.embedding_multiplier, dtype=dtype))


def scaled_logits(config: ModelConfig, logits: Tensor) -> Tensor:
    """Of what the output layer gives: float32."""
    logits = logits.float()
    if config.logit_multiplier != 1:
        logits = logits * config.logit_multiplier
    if config.logit_softcap is not None:
        logits = torch.tanh(logits / config.logit_softcap) * config.logit_softcap
    return logits


def run_layer(
    config: ModelConfig,
    layer: Layer,
    index: int,
    attention: Attention,
    residual: Tensor,
    angles: Angles,
    keys: KVPages,
    values: KVPages,
    step: ModelInput,
    inputs: Tensor | None = None,
) -> Tensor:
    """What a layer makes of the states before it, (T, hidden_size).

    index: which layer of the model it is. angles: of the step's positions. keys, values: the
    layer's own part of the pool; the step's are written to them, unless it reads another layer's.
    inputs: its own of each token, (T, size), where the model has any.
    """
    eps = config.rms_norm_eps
    x = _normed(residual, layer.input_norm, eps)
    attended = _attend(config, layer, index, attention, x, angles, keys, values, step)
    attended = summed(layer.group, attended)
    residual = residual + _normed(attended, layer.attended_norm, eps)
    return _through_mlp(config, layer, index, residual, step, inputs)


def summed(group: Group | None, tensor: Tensor) -> Tensor:
    """The sum of what all ranks have; in float32, where that of a type is not known to a group."""
    if group is None:
        return tensor
    wide = tensor.float() if tensor.dtype is torch.float16 else tensor
    group.all_reduce(wide)
    return wide.to(tensor.dtype)


def _through_mlp(
    config: ModelConfig,
    layer: Layer,
    index: int,
    residual: Tensor,
    step: ModelInput,
    inputs: Tensor | None,
) -> Tensor:
    eps = config.rms_norm_eps
    change = _mlp(config, layer, index, _normed(residual, layer.mlp_norm, eps), step)
    if layer.beside is not None:
        gated, of_ranks = partial(_gated, config), partial(summed, layer.group)
        change = layer.beside(residual, change, gated, eps, of_ranks)
    else:
        change = summed(layer.group, change)
    residual = residual + _normed(change, layer.active_norm, eps)
    if layer.per_layer_input is not None:
        assert inputs is not None
        residual = residual + layer.per_layer_input(residual, inputs, eps)
    return residual if layer.scalar is None else residual * layer.scalar


def _recur(
    layer: Layer,
    delta_net: DeltaNet,
    recurrence: Recurrence,
    x: Tensor,
    matrices: Tensor,
    inputs: Tensor,
    segments: Segments,
) -> Tensor:
    """What a gated delta net makes of x, (T, hidden_size)."""
    projected, gates = layer.qkv(x).float(), delta_net.gates(x).float()
    mixed = recurrence(delta_net, projected, gates, matrices, inputs, segments)
    return layer.output(mixed.to(x.dtype))


def _mlp(config: ModelConfig, layer: Layer, index: int, x: Tensor, step: ModelInput) -> Tensor:
    if layer.router is None:
        gate, up = adapted(layer.gate_up, x, step.adapters, index, Stack.GATE_UP).chunk(2, dim=-1)
        return adapted(layer.down, _gated(config, gate, up), step.adapters, index, Stack.DOWN)
    assert config.experts is not None
    gated = partial(_gated, config)
    y = mixed(config.experts, x, layer.router(x), layer.gate_up, layer.down, gated)
    return y if layer.shared is None else y + layer.shared(x, gated)


def _gated(config: ModelConfig, gate: Tensor, up: Tensor) -> Tensor:
    if config.clamped_swiglu is None:
        return _ACTIVATIONS[config.activation](gate) * up
    return clamped_swiglu(gate, up, *config.clamped_swiglu)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


def _attend(
    config: ModelConfig,
    layer: Layer,
    index: int,
    attention: Attention,
    x: Tensor,
    angles: Angles,
    keys: KVPages,
    values: KVPages,
    step: ModelInput,
) -> Tensor:
    projected = adapted(layer.qkv, x, step.adapters, index, Stack.QKV)
    query, *own = torch.split(projected, list(layer.shape.qkv.values()), dim=1)
    gate = None
    if config.attention_gates:
        query, gate = query.view(len(x), config.num_heads, -1).chunk(2, dim=-1)
        query = query.flatten(1)
    if config.whole_qk_norm:
        query, own[0] = normed_whole(layer, query, own[0], config.rms_norm_eps)
    cos, sin = angles.cos.unsqueeze(1), angles.sin.unsqueeze(1)

    def heads(projected: Tensor, norm: Tensor | None) -> Tensor:
        """Of queries or keys."""
        each = projected.view(len(x), -1, layer.shape.heads.head_dim)
        if not config.whole_qk_norm:
            each = _normed(each, norm, config.rms_norm_eps)
        return rotate(each, cos, sin, angles.rotary_dim)

    if own:
        value = own[-1].view(len(x), -1, layer.shape.heads.head_dim)
        if config.value_norm:
            value = unit_norm(value, config.rms_norm_eps)
        store(keys, step.kv_slots, heads(own[0], layer.key_norm))
        store(values, step.kv_slots, value)
    query = heads(query, layer.query_norm)
    if angles.query_factors is not None:
        query = (query.float() * angles.query_factors.view(-1, 1, 1)).to(query.dtype)
    mixed = attention(query, keys, values, step, layer.window, layer.sinks)
    if gate is not None:
        mixed = mixed * torch.sigmoid(gate)
    return adapted(layer.output, mixed.flatten(1), step.adapters, index, Stack.OUTPUT)


def normed_whole(layer: Layer, query: Tensor, key: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Each over all heads, those of other ranks too."""
    if layer.group is None:
        return _normed(query, layer.query_norm, eps), _normed(key, layer.key_norm, eps)
    means = torch.stack([each.float().square().mean(-1) for each in (query, key)])
    assert layer.query_norm is not None and layer.key_norm is not None, "whole_qk_norm has both"
    # Every rank has as many heads, and a head that several have counts equally often as another.
    of_all = summed(layer.group, means) / layer.group.size
    factors = (of_all + eps).rsqrt().unsqueeze(-1)
    norms = (layer.query_norm, layer.key_norm)
    query, key = (
        (each.float() * factor * weight).to(each.dtype)
        for each, factor, weight in zip((query, key), factors, norms, strict=True)
    )
    return query, key


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else rms_norm(x, weight, eps)


def read_norm(config: ModelConfig, weights: WeightSource, size: int, name: str) -> Tensor:
    weight = weights.read((size,), name)
    return weight.float() + config.norm_offset if config.wide_norms else weight


def read_layer(
    config: ModelConfig,
    weights: WeightSource,
    make_linear: MakeLinear,
    index: int,
    group: Group | None = None,
) -> Layer:
    prefix = f"model.layers.{index}."
    hidden, shape = config.hidden_size, config.layer_shape(index)
    head_dim, mlp = shape.heads.head_dim, shape.intermediate_size
    mlp_bias, num_mlps = config.mlp_bias, 1
    kv_size = shape.heads.num_kv_heads * head_dim

    def norm(is_there: bool, size: int, name: str) -> Tensor | None:
        return read_norm(config, weights, size, f"{prefix}{name}.weight") if is_there else None

    def linear(rows: int, columns: int, has_bias: bool, *names: str) -> Linear:
        full_names = (prefix + name for name in names)
        return read_linear(weights, make_linear, rows, columns, *full_names, has_bias=has_bias)

    qkv_names = tuple(shape.qkv)
    gate_up_names: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    if config.has_fused_names:
        qkv_names, gate_up_names = ("self_attn.qkv_proj",), ("mlp.gate_up_proj",)
    down_names: tuple[str, ...] = ("mlp.down_proj",)
    router = shared = delta_net = None
    experts = config.experts_of(index)
    if experts is not None and not experts.is_beside_mlp:
        mlp, mlp_bias = experts.intermediate_size, experts.has_biases
        num_mlps = experts.num_experts
        gate_up_names = tuple(experts.gate_up_names())
        down_names = tuple(experts.down_names())
        router = _read_router(experts, weights, make_linear, hidden, prefix + experts.router)
        if size := experts.shared_size:
            shared = SharedExpert(
                linear(2 * size, hidden, False, *SHARED_GATE_UP),
                linear(hidden, size, False, SHARED_DOWN),
                make_linear(weights.read((1, hidden), f"{prefix}{SHARED_GATE}.weight"), None),
            )
    qkv_size, qkv_bias = shape.qkv_size, config.qkv_bias
    output_name, output_size, output_bias = "self_attn.o_proj", shape.query_size, config.output_bias
    if (net := config.delta_net_of(index)) is not None:
        delta_net = _read_delta_net(config, net, weights, make_linear, prefix)
        qkv_names = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
        output_name, output_size = "linear_attn.out_proj", net.num_values
        qkv_size = net.num_channels + output_size
        qkv_bias = output_bias = False
    # With norms after the layers' parts, the first of these keeps the name of Llama's second.
    mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    pre, post, whole = config.pre_norms, config.post_norms, config.whole_qk_norm
    of_heads = config.qk_norm and net is None
    return Layer(
        input_norm=norm(pre, hidden, "input_layernorm"),
        qkv=linear(qkv_size, hidden, qkv_bias, *qkv_names),
        query_norm=norm(of_heads, shape.query_size if whole else head_dim, _QUERY_NORM),
        key_norm=norm(of_heads and shape.has_keys, kv_size if whole else head_dim, _KEY_NORM),
        output=linear(hidden, output_size, output_bias, output_name),
        attended_norm=norm(post, hidden, "post_attention_layernorm"),
        mlp_norm=norm(pre, hidden, mlp_norm),
        router=router,
        gate_up=linear(num_mlps * 2 * mlp, hidden, mlp_bias, *gate_up_names),
        down=linear(num_mlps * hidden, mlp, mlp_bias, *down_names),
        active_norm=norm(post, hidden, "post_feedforward_layernorm"),
        sinks=weights.read((config.num_heads,), prefix + _SINKS).float()
        if config.attention_sinks
        else None,
        window=config.windows[index],
        shape=shape,
        group=group,
        shared=shared,
        delta_net=delta_net,
        beside=ExpertsBeside.read(config, experts, weights, make_linear, prefix)
        if experts is not None and experts.is_beside_mlp
        else None,
        per_layer_input=PerLayerInput.read(config, weights, make_linear, prefix),
        scalar=weights.read((1,), f"{prefix}layer_scalar") if config.layer_scalars else None,
    )


def _read_delta_net(
    config: ModelConfig,
    net: DeltaNetConfig,
    weights: WeightSource,
    make_linear: MakeLinear,
    prefix: str,
) -> DeltaNet:
    def read(shape: tuple[int, ...], name: str) -> Tensor:
        return weights.read(shape, f"{prefix}linear_attn.{name}").float()

    heads = (net.num_value_heads,)
    gate_names = (f"{prefix}linear_attn.in_proj_{name}" for name in "ba")
    return DeltaNet(
        config=net,
        gates=read_linear(weights, make_linear, 2 * heads[0], config.hidden_size, *gate_names),
        taps=read((net.num_channels, 1, net.num_taps), "conv1d.weight").squeeze(1).t().contiguous(),
        decay=-read(heads, "A_log").exp(),
        bias=read(heads, "dt_bias"),
        norm=read((net.value_dim,), "norm.weight"),
        eps=config.rms_norm_eps,
    )


def _read_router(
    experts: ExpertsConfig, weights: WeightSource, make_linear: MakeLinear, hidden: int, name: str
) -> Linear:
    """Never quantized: it is small, and a little error in it chooses other experts."""
    num = experts.num_experts
    bias = weights.read((num,), f"{name}.bias") if experts.has_biases else None
    return make_linear(weights.read((num, hidden), f"{name}.weight"), bias)


_QUERY_NORM, _KEY_NORM = "self_attn.q_norm", "self_attn.k_norm"
_SINKS = "self_attn.sinks"
