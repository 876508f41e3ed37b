"""`NativeModel`: a whole step in one call of C++ (step.cpp)."""

import ctypes
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, Structure, c_char_p, c_double, c_int64, c_void_p, pointer

import torch
from torch import Tensor

from penstock.engine.memory.kv_codes import Codes, KVPages
from penstock.engine.memory.kv_pool import LayerPools
from penstock.engine.memory.kv_shape import KVHeads
from penstock.engine.model_input import ModelInput
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import UnsupportedFeature
from penstock.engine.models.layers.linear import Linear, PlainLinear
from penstock.engine.models.llama import DecoderLayer, LlamaModel
from penstock.engine.models.lora.adapter import Adapter
from penstock.engine.models.parts.attention.config import Attention
from penstock.engine.models.parts.delta_net.config import DeltaNet
from penstock.engine.models.parts.embedding.layer import multiplier
from penstock.engine.models.parts.experts.config import Experts
from penstock.engine.models.parts.experts.layer import ExpertsLayer
from penstock.engine.models.parts.mlp.config import MLP
from penstock.engine.models.parts.norm.config import Norms, Scalar
from penstock.engine.models.parts.per_layer_inputs.config import PerLayerInput
from penstock.engine.models.parts.tensors import Part, Stack
from penstock.engine.models.stage import num_passed
from penstock.engine.native.adapters import NativeAdapter, native_runs
from penstock.engine.native.packing import (
    PATH,
    NativeLinear,
    Packer,
    check_format,
    parts,
    release,
)
from penstock.engine.ranks.shared_memory import SharedMemoryGroup

# structs.h has room for so many layers that are stacked.
_MAX_STACKED = 3
# coded_runs.h has room for so many codes of a head.
_MAX_CODED_HEAD_DIM = 1024


class _Expert(Structure):
    _fields_ = (("gate", NativeLinear), ("up", NativeLinear), ("down", NativeLinear))


class _Beside(Structure):
    _fields_ = (
        ("router_norm", c_void_p),
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("output_norm", c_void_p),
        ("factors", c_void_p),
    )


class _Heads(Structure):
    _fields_ = (
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("rotary_dim", c_int64),
        ("query_factors", c_void_p),
    )


class _Layer(Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("attended_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("active_norm", c_void_p),
        ("qkv", NativeLinear * _MAX_STACKED),
        ("output", NativeLinear),
        ("gate", NativeLinear),
        ("up", NativeLinear),
        ("down", NativeLinear),
        ("experts", POINTER(_Expert)),
        ("router", NativeLinear),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("sinks", c_void_p),
        ("window", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("angles_step", c_int64),
        ("group", c_int64),
        ("heads", c_int64),
        ("kv_parts", c_int64),
        ("mlp", c_int64),
        ("beside", POINTER(_Beside)),
        ("input_gate", NativeLinear),
        ("input_projection", NativeLinear),
        ("input_change_norm", c_void_p),
        ("scalar", c_double),
    )


class _Model(Structure):
    _fields_ = (
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("mlp", c_int64),
        ("block_size", c_int64),
        ("kinds", POINTER(_Heads)),
        ("num_kinds", c_int64),
        ("eps", c_double),
        ("layers", POINTER(_Layer)),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("embedding_in_bands", c_int64),
        ("lm_head", NativeLinear),
        ("whole_qk_norm", c_int64),
        ("has_post_norms", c_int64),
        ("is_gelu", c_int64),
        ("embedding_multiplier", c_double),
        ("logit_multiplier", c_double),
        ("logit_softcap", c_double),
        ("norms_values", c_int64),
        ("inputs", NativeLinear),
        ("inputs_norm", c_void_p),
        ("input_size", c_int64),
        ("input_scale", c_double),
        ("experts", c_int64),
        ("experts_each", c_int64),
        ("expert_mlp", c_int64),
        ("are_weights_normed", c_int64),
        ("swiglu_alpha", c_double),
        ("swiglu_limit", c_double),
        ("ranks", c_void_p),
        ("all_reduce", c_void_p),
        ("num_ranks", c_int64),
        ("first_id", c_int64),
    )


class _Step(Structure):
    _fields_ = (
        ("tokens", c_int64),
        ("sequences", c_int64),
        ("samples", c_int64),
        ("max_blocks", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("kv_slots", c_void_p),
        ("sample_rows", c_void_p),
        ("block_tables", c_void_p),
        ("query_starts", c_void_p),
        ("logits", c_void_p),
        ("states", c_void_p),
        ("runs", c_void_p),
        ("num_runs", c_int64),
        ("width", c_int64),
        ("timeout_ns", c_int64),
        ("input_rows", c_void_p),
        ("received", c_void_p),
        ("sent", c_void_p),
    )


class NativeModel:
    """`LlamaModel` on its weights and one KV pool: see `Model`.

    The weights are packed where they are, so the LlamaModel itself cannot compute any more.
    """

    def __init__(
        self, library: ctypes.CDLL, model: LlamaModel, pool: LayerPools, threads: int
    ) -> None:
        """library: see `load_library`. Raises UnsupportedFeature or UnsupportedWeightFormat, before
        it packs anything."""
        config = model.config
        assert model.group is None or isinstance(model.group, SharedMemoryGroup), model.group
        self._library, self._group, self._pipeline = library, model.group, model.pipeline
        self._first_layer = model.first_layer
        self._num_passed = num_passed(config)
        self._dtype = model.embedding.dtype
        self._vocab_size = config.vocab_size
        check_features(config, self._dtype)
        check_format(model.lm_head)
        for layer in model.layers:
            for linear in _linears(layer):
                check_format(linear)
        packer = Packer(library)
        mixture, inputs = config.experts, model.per_layer_inputs
        if inputs is not None:
            check_format(inputs.projection)
        tables = model.rotary.layers
        # The first layer of each kind of heads.
        firsts: dict[KVHeads, int] = {}
        for index, layer in enumerate(model.layers):
            firsts.setdefault(layer.attention.config.heads, index)
        kinds = list(firsts)

        def pack(linear: Linear, *rows: int) -> list[NativeLinear]:
            packed = packer.packed(parts(linear, self._dtype, *rows))
            release(linear)
            return packed

        def pages(of: KVPages) -> tuple[int | None, int | None]:
            """Where keys or values are, and their scales if they are codes."""
            if isinstance(of, Codes):
                return packer.address(of.codes), packer.address(of.scales)
            return packer.address(of), None

        def norm(weight: Tensor | None) -> int | None:
            return None if weight is None else packer.address(weight.float())

        def native_layer(index: int) -> _Layer:
            layer, angles = model.layers[index], model.rotary.layers[index]
            attention = layer.attention
            num_rows = len(angles.cos) if angles.cos.stride(0) else 1
            (keys, key_scales), (values, value_scales) = map(pages, pool.layer(index))
            [output] = pack(attention.output)
            native = _Layer(
                input_norm=norm(layer.input_norm),
                query_norm=norm(attention.query_norm),
                key_norm=norm(attention.key_norm),
                attended_norm=norm(layer.attended_norm),
                mlp_norm=norm(layer.mlp_norm),
                active_norm=norm(layer.active_norm),
                qkv=(NativeLinear * _MAX_STACKED)(*pack(attention.qkv)),
                output=output,
                keys=keys,
                values=values,
                key_scales=key_scales,
                value_scales=value_scales,
                sinks=packer.address(attention.sinks),
                window=attention.config.window or 0,
                cos=packer.address(angles.cos[:num_rows]),
                sin=packer.address(angles.sin[:num_rows]),
                angles_step=angles.cos.stride(0),
                group=pool.group_of(index),
                heads=kinds.index(attention.config.heads),
                kv_parts=attention.config.num_kv_parts,
                mlp=0 if layer.mlp is None else layer.mlp.config.size,
                scalar=1.0 if layer.scalar is None else float(layer.scalar),
            )
            own = layer.per_layer_input
            if own is not None:
                [native.input_gate] = pack(own.gate)
                [native.input_projection] = pack(own.projection)
                native.input_change_norm = norm(own.norm)
            if layer.mlp is not None:
                native.gate, native.up = pack(layer.mlp.gate_up, native.mlp, native.mlp)
                [native.down] = pack(layer.mlp.down)
            if layer.experts is not None:
                add_experts(native, layer.experts)
            return native

        def add_experts(native: _Layer, layer: ExpertsLayer) -> None:
            [native.router] = pack(layer.router)
            num, size = layer.config.num_experts, layer.config.size
            gate_up, down, beside = layer.gate_up, layer.down, layer.beside
            if beside is not None:
                norms = (beside.router_norm, beside.input_norm, beside.mlp_norm, beside.output_norm)
                native.beside = pointer(_Beside(*map(norm, norms), norm(beside.factors)))
            of_gates = pack(gate_up, *[size] * (2 * num))
            of_downs = pack(down, *[config.hidden_size] * num)
            experts = zip(of_gates[::2], of_gates[1::2], of_downs, strict=True)
            native.experts = (_Expert * num)(*(_Expert(*expert) for expert in experts))

        [head] = parts(model.lm_head, self._dtype)
        # Without one, of another stage, its size still says which ids this rank embeds.
        packed_head = NativeLinear(rows=config.vocab_size, columns=config.hidden_size)
        if has_head := len(model.norm) > 0:
            [packed_head] = packer.packed([head])
        with ThreadPoolExecutor(threads) as workers:
            made = workers.map(native_layer, range(config.num_layers))
            layers = (_Layer * config.num_layers)(*made)
        embedding, in_bands = model.embedding, False
        if (
            has_head and config.head.is_tied and isinstance(head, PlainLinear)
        ):  # then it is in memory once
            embedding, in_bands = head.weight, True
        alpha, limit = (mixture and mixture.activation.clamp) or (0.0, 0.0)
        self._model = _Model(
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            heads=config.num_heads,
            mlp=max(*(layer.mlp for layer in layers), inputs.shape[1] if inputs else 0),
            block_size=pool.layer(0)[0].shape[1],
            kinds=(_Heads * len(kinds))(
                *(
                    _Heads(
                        kv_heads=heads.num_kv_heads,
                        head_dim=heads.head_dim,
                        rotary_dim=tables[first].rotary_dim,
                        query_factors=packer.address(tables[first].query_factors),
                    )
                    for heads, first in firsts.items()
                )
            ),
            num_kinds=len(kinds),
            eps=config.norm.eps,
            layers=layers,
            embedding=packer.address(embedding),
            norm=norm(model.norm),
            embedding_in_bands=in_bands,
            lm_head=packed_head,
            whole_qk_norm=any(attention.norms_whole for attention in config.attentions),
            has_post_norms=any(layer.norms.post for layer in config.layers),
            is_gelu=any(layer.mlp and layer.mlp.activation.is_gelu for layer in config.layers),
            embedding_multiplier=multiplier(config.embedding, self._dtype),
            logit_multiplier=config.head.multiplier,
            logit_softcap=config.head.softcap or 0.0,
            norms_values=any(attention.norms_values for attention in config.attentions),
            experts=mixture.num_experts if mixture else 0,
            experts_each=mixture.num_per_token if mixture else 0,
            expert_mlp=mixture.size if mixture else 0,
            are_weights_normed=bool(mixture and mixture.is_normed),
            swiglu_alpha=alpha,
            swiglu_limit=limit,
        )
        self._inputs = inputs
        if inputs is not None:
            [self._model.inputs] = pack(inputs.projection)
            self._model.inputs_norm = norm(inputs.norm)
            self._model.input_size, self._model.input_scale = inputs.shape[1], inputs.scale
        if self._group is not None and model.shard is not None:
            self._model.ranks, self._model.all_reduce = self._group.all_reduce_lane
            self._model.num_ranks, self._model.first_id = self._group.size, model.shard.first_id
        self._rows = [
            {
                Stack.QKV: [linear.rows for linear in layer.qkv if linear.rows],
                Stack.OUTPUT: [layer.output.rows],
                Stack.GATE_UP: [layer.mlp, layer.mlp],
                Stack.DOWN: [layer.down.rows],
            }
            for layer in layers
        ]
        # What the pointers above point into.
        self._kept = (packer, pool, [(layer.experts, layer.beside) for layer in layers])
        # Reused: page faults of new memory take longer than what is written to it.
        self._logits = torch.empty(0, self._vocab_size)
        library.penstock_make.restype = c_void_p
        library.penstock_step.restype = library.penstock_failed.restype = c_int64
        self.num_experts_read: int | None = None
        """By the last step, over all layers; None for a dense model."""
        self._runner = c_void_p(library.penstock_make(ctypes.byref(self._model), c_int64(threads)))
        weakref.finalize(self, library.penstock_free, self._runner)
        self.products = _products(library)
        """What multiplies matrices, for people to read."""

    def __call__(self, step: ModelInput, pool: LayerPools) -> Tensor:
        """See `Model`. The logits are those of this step until the next is run."""
        num_rows = 0 if self._sends else len(step.sample_rows)
        if len(self._logits) < num_rows:
            self._logits = torch.empty(2 * num_rows, self._vocab_size)
        logits = self._logits[:num_rows]
        self._step(step, step.sample_rows, logits=_address(logits))
        return logits

    def states(self, step: ModelInput, pool: LayerPools, rows: Tensor) -> Tensor:
        num_rows = 0 if self._sends else len(rows)
        states = torch.empty(num_rows, self._model.hidden, dtype=self._dtype)
        self._step(step, rows, states=_address(states))
        return states

    def logits(self, states: Tensor) -> Tensor:
        logits = torch.empty(len(states), self._vocab_size)
        native_step = _Step(
            samples=len(states),
            logits=_address(logits),
            states=_address(states),
        )
        self._library.penstock_logits(self._runner, ctypes.byref(native_step))
        return logits

    def packed_adapter(self, adapter: Adapter) -> NativeAdapter:
        """As `ModelInput.adapters` needs it."""
        return NativeAdapter(adapter, self._rows)

    def argmax(self, logits: Tensor) -> Tensor:
        """As `penstock.engine.sampling.sampler.argmax`."""
        ids = torch.empty(len(logits), dtype=torch.int64)
        self._library.penstock_likeliest(
            self._runner,
            c_void_p(_address(logits)),
            c_int64(logits.shape[0]),
            c_int64(logits.shape[1]),
            c_void_p(ids.data_ptr()),
        )
        return ids

    @property
    def _sends(self) -> bool:
        """Whether a later stage computes what comes after the layers."""
        return self._pipeline is not None and self._pipeline.after is not None

    def _step(
        self,
        step: ModelInput,
        rows: Tensor,
        *,
        logits: int | None = None,
        states: int | None = None,
    ) -> None:
        query_starts = torch.tensor(step.query_starts, dtype=torch.int32)
        width = max((run.weights.width for run in step.adapters), default=0)
        # None where they change layers of other stages alone.
        runs = native_runs(step.adapters if width else ())
        input_rows = None if self._inputs is None else self._inputs.rows(step.token_ids)
        pipeline, num_tokens = self._pipeline, len(step.token_ids)
        passed_shape = self._num_passed * num_tokens, self._model.hidden
        received = sent = None
        if pipeline is not None and pipeline.before is not None:
            received = pipeline.receive(*passed_shape, torch.float32)
        if pipeline is not None and pipeline.after is not None:
            sent = pipeline.room(*passed_shape, torch.float32)
        native_step = _Step(
            tokens=num_tokens,
            sequences=len(step.context_lens),
            samples=len(rows),
            max_blocks=step.block_tables.shape[-1],
            token_ids=_address(step.token_ids),
            positions=_address(step.positions),
            kv_slots=_address(step.kv_slots),
            sample_rows=_address(rows),
            block_tables=_address(step.block_tables),
            query_starts=_address(query_starts),
            logits=logits,
            states=states,
            runs=ctypes.addressof(runs),
            num_runs=len(runs),
            width=width,
            timeout_ns=self._group.timeout_ns if self._group else 0,
            input_rows=_address(input_rows),
            received=_address(received),
            sent=_address(sent),
        )
        num_experts = self._library.penstock_step(self._runner, ctypes.byref(native_step))
        if self._group is not None:
            self._check_ranks(self._group)
        if pipeline is not None and received is not None:
            pipeline.taken()
        if pipeline is not None and sent is not None:
            pipeline.send()
        if self._model.experts:
            self.num_experts_read = num_experts

    def _check_ranks(self, group: SharedMemoryGroup) -> None:
        """Raises RankFailed."""
        layer, outcome = divmod(self._library.penstock_failed(self._runner), 256)
        if outcome:
            phase = f"layer {self._first_layer + layer - 1}" if layer else "the embedding"
            with group.doing.during(phase):
                raise group.failed("all_reduce", outcome)


def _linears(layer: DecoderLayer) -> Iterator[Linear]:
    """All that are packed but routers."""
    yield from (layer.attention.qkv, layer.attention.output)
    for part in (layer.mlp, layer.experts):
        if part is not None:
            yield from (part.gate_up, part.down)
    if (own := layer.per_layer_input) is not None:
        yield from (own.gate, own.projection)


def check_features(config: ModelConfig, dtype: torch.dtype) -> None:
    """Raises UnsupportedFeature for a model that step.cpp does not compute."""
    config.check_parts(PATH, _lacks)
    sizes = {"an odd hidden_size": config.hidden_size}
    for layer in config.layers:
        if layer.mlp is not None:
            sizes["an odd intermediate_size"] = layer.mlp.size
        if (experts := layer.experts) is not None:
            if layer.norms.post and not experts.is_beside_mlp:
                raise UnsupportedFeature(["experts with post_norms"], PATH)
            sizes["experts of an odd size"] = experts.size
    if config.per_layer_inputs is not None:
        sizes["per-layer inputs of an odd size"] = config.per_layer_inputs.size
    odd = [name for name, size in sizes.items() if size % 2]
    if odd and dtype is torch.bfloat16:
        raise UnsupportedFeature(odd, PATH)


def _lacks(part: Part) -> tuple[str, ...]:
    """What of it step.cpp does not compute."""
    if isinstance(part, Attention):
        return ("attention_gates",) if part.has_gates else ()
    if isinstance(part, DeltaNet):
        return ("delta_net",)
    is_known = type(part) in (MLP, Experts, Norms, PerLayerInput, Scalar)
    return () if is_known else (type(part).__name__,)


def may_code_kv(config: ModelConfig) -> bool:
    """Whether keys and values of this model may be codes of 8 bits: see coded_runs.h."""
    head_dims = {heads.head_dim for heads in config.kv_shape.heads}
    return all(size % 4 == 0 and size <= _MAX_CODED_HEAD_DIM for size in head_dims)


def _products(library: ctypes.CDLL) -> str:
    library.penstock_products.restype = library.penstock_code_products.restype = c_char_p
    plain = library.penstock_products().decode()
    codes = library.penstock_code_products()
    return plain if codes is None else f"{plain} (codes: {codes.decode()})"


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.data_ptr()
