"""A model's config.json in one form for all families. Imports no tensors."""

import dataclasses
import logging
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from penstock.engine.attention.shape import AttentionShape
from penstock.engine.config import ModelImpl
from penstock.engine.memory.kv_layout import KVLayout
from penstock.engine.memory.kv_shape import KVHeads, KVShape
from penstock.engine.models.delta_net import DeltaNetConfig
from penstock.engine.models.errors import InvalidModel, UnsupportedFeature
from penstock.engine.models.experts import MAX_WIDTH, ExpertsConfig
from penstock.engine.models.families import FAMILIES, Head, find_family
from penstock.engine.models.json_file import Fields, is_number, read_object, shown
from penstock.engine.models.keys import check_keys
from penstock.engine.models.layer_shape import LayerShape
from penstock.engine.models.per_layer_inputs import PROJECTION, PerLayerInputsConfig
from penstock.engine.models.quantization.config import QuantizationConfig
from penstock.engine.models.quantization.parse import read_quantization
from penstock.engine.models.quantization.schemes import KeptBytes, Scheme
from penstock.engine.models.rope import RopeConfig, check_neutral, longest_sequence
from penstock.engine.models.tensor_names import tensor_names, text_model_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer like Llama: RMSNorm, rotary positions, a gated MLP.

    is_wrapped: whether it is the text model of a model of text and images. has_fused_names: see
    `Family`. windows: for each layer, how many positions a token attends to, its own included, or
    None for all before it. quantization: None where all weights are plain.

    Fields with a default are `features`, in which families differ; a path that computes the layers
    itself names those that it knows, and refuses models with others.

    qk_norm: of each head of queries and keys; of all heads together with whole_qk_norm. pre_norms,
    post_norms: of what attention and the MLP read, and of what they give before it is added.
    norm_offset: added to a norm's weight, which is then, as with wide_norms, multiplied in float32.
    layer_ropes: of each layer, None for one without rotary positions, where not all have `rope`.
    rotary_dim: how many dimensions of a head are rotated, where not all are. query_scaling: see
    `RopeSettings`. attention_scale: of scores, where it is not head_dim ** -0.5. attention_sinks:
    whether each head has one score more, which takes its share and has no value. experts: None
    where every layer has one MLP, of intermediate_size. clamped_swiglu: (alpha, limit), where
    experts have gpt-oss's activation: gate * sigmoid(alpha * gate) * (up + 1), of both clamped.

    delta_net: None where all layers have attention; its layers have None among windows.
    attention_gates: whether what attention gives is multiplied by the sigmoid of a gate, which
    q_proj gives after each head's query.

    Of Gemma 4: full_heads, of the layers without a window, where these have others; and whether
    they have one matrix for both, keys_are_values: see `LayerShape`. value_norm: values are
    normalised too, without a weight. num_shared_kv_layers: so many of the last layers read the keys
    and values of the last layer of their kind before them. wide_shared_mlps: whether the MLPs of
    those are twice as wide. layer_scalars: what a layer gives is multiplied by a number of its own.
    per_layer_inputs: see there. logit_softcap: logits are cap * tanh(logit / cap).
    """

    family: str
    is_wrapped: bool
    has_fused_names: bool
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    quantization: QuantizationConfig | None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    wide_norms: bool = False
    norm_offset: float = 0.0
    activation: str = "silu"
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    rotary_dim: int | None = None
    query_scaling: tuple[float, int] | None = None
    attention_scale: float | None = None
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    attention_sinks: bool = False
    experts: ExpertsConfig | None = None
    clamped_swiglu: tuple[float, float] | None = None
    delta_net: DeltaNetConfig | None = None
    attention_gates: bool = False
    full_heads: KVHeads | None = None
    keys_are_values: bool = False
    value_norm: bool = False
    num_shared_kv_layers: int = 0
    wide_shared_mlps: bool = False
    layer_scalars: bool = False
    per_layer_inputs: PerLayerInputsConfig | None = None
    logit_softcap: float | None = None
    model_impl: ClassVar[ModelImpl] = ModelImpl.PENSTOCK

    @property
    def features(self) -> frozenset[str]:
        """The fields that have a default and another value."""
        return frozenset(
            field.name
            for field in dataclasses.fields(self)
            if field.default is not dataclasses.MISSING
            and getattr(self, field.name) != field.default
        )

    def check_features(self, path: str, supported: Set[str]) -> None:
        """path: its name in error messages. Raises UnsupportedFeature."""
        if unsupported := self.features - supported:
            raise UnsupportedFeature(unsupported, path)

    @property
    def kv_shape(self) -> KVShape:
        heads = tuple(self.layer_shape(layer).heads for layer in range(self.num_layers))
        if not self.num_shared_kv_layers:
            return KVShape(heads)
        return KVShape(heads, tuple(map(self._kv_source, range(self.num_layers))))

    def _kv_source(self, layer: int) -> int:
        """The layer whose keys and values it reads."""
        first_shared = self.num_layers - self.num_shared_kv_layers
        if layer < first_shared:
            return layer
        window = self.windows[layer]
        return max(each for each in range(first_shared) if self.windows[each] == window)

    def layer_shape(self, layer: int) -> LayerShape:
        heads, is_full = KVHeads(self.num_kv_heads, self.head_dim), self.windows[layer] is None
        if is_full and self.full_heads is not None:
            heads = self.full_heads
        is_recurrent = self.delta_net_of(layer) is not None
        if is_recurrent:
            heads = heads._replace(num_kv_heads=0)
        is_shared = layer >= self.num_layers - self.num_shared_kv_layers
        is_wide = is_shared and self.wide_shared_mlps
        return LayerShape(
            num_heads=self.num_heads,
            heads=heads,
            intermediate_size=self.intermediate_size * (2 if is_wide else 1),
            has_gates=self.attention_gates,
            has_keys=not is_shared and not is_recurrent,
            has_values=not (is_full and self.keys_are_values),
        )

    def kv_layout(self, max_model_len: int) -> KVLayout:
        if self.delta_net is None:
            return KVLayout.of(self.windows, max_model_len)
        layers, state = self.delta_net.layers, self.delta_net.state_shape
        return KVLayout.of(self.windows, max_model_len, layers, state)

    def attention_windows(self, block_size: int) -> dict[AttentionShape, set[int | None]]:
        """Those that layers of each shape have; not of layers with a recurrence."""
        found: dict[AttentionShape, set[int | None]] = {}
        for layer, window in enumerate(self.windows):
            heads = self.layer_shape(layer).heads
            if heads.num_kv_heads:
                shape = AttentionShape(
                    num_heads=self.num_heads,
                    num_kv_heads=heads.num_kv_heads,
                    head_dim=heads.head_dim,
                    block_size=block_size,
                )
                found.setdefault(shape, set()).add(window)
        return found

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """None where the layer has one MLP alone."""
        return self.experts if self.experts is not None and self.experts.layers[layer] else None

    def delta_net_of(self, layer: int) -> DeltaNetConfig | None:
        """None where the layer has attention."""
        has_one = self.delta_net is not None and self.delta_net.layers[layer]
        return self.delta_net if has_one else None

    def linear_shapes(self, layer: int) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of a layer's matrices, by their names in a checkpoint."""
        experts = self.experts_of(layer)
        of_experts = {} if experts is None else experts.linear_shapes(self.hidden_size)
        return self._dense_shapes(layer) | of_experts

    def _dense_shapes(self, layer: int) -> dict[str, tuple[int, int]]:
        """The same, without experts."""
        hidden, shape, experts = self.hidden_size, self.layer_shape(layer), self.experts_of(layer)
        mlp = shape.intermediate_size
        if self.has_fused_names:
            return {
                "self_attn.qkv_proj": (shape.qkv_size, hidden),
                "self_attn.o_proj": (hidden, shape.query_size),
                "mlp.gate_up_proj": (2 * mlp, hidden),
                "mlp.down_proj": (hidden, mlp),
            }
        if (net := self.delta_net_of(layer)) is not None:
            shapes = net.linear_shapes(hidden)
        else:
            shapes = {name: (rows, hidden) for name, rows in shape.qkv.items()}
            shapes["self_attn.o_proj"] = (hidden, shape.query_size)
        if experts is None or experts.is_beside_mlp:
            shapes |= {
                "mlp.gate_proj": (mlp, hidden),
                "mlp.up_proj": (mlp, hidden),
                "mlp.down_proj": (hidden, mlp),
            }
        if self.per_layer_inputs is not None:
            shapes |= self.per_layer_inputs.linear_shapes(hidden)
        return shapes

    def _num_matrix_weights(self, layer: int) -> int:
        """Elements of a layer's matrices but those of experts and routers."""
        return sum(rows * columns for rows, columns in self._dense_shapes(layer).values())

    def _num_vector_weights(self, layer: int) -> int:
        """Of a layer's norms, biases and numbers of its own."""
        hidden, shape, experts = self.hidden_size, self.layer_shape(layer), self.experts_of(layer)
        num = 2 * hidden * (self.pre_norms + self.post_norms) + self.layer_scalars
        net = self.delta_net_of(layer)
        num += self._num_attention_vectors(shape) if net is None else net.num_small_weights
        if self.per_layer_inputs is not None:
            num += hidden  # a norm
        if experts is None:
            num += (2 * shape.intermediate_size + hidden) * self.mlp_bias
        return num

    def _num_attention_vectors(self, shape: LayerShape) -> int:
        """Of norms of heads, biases and sinks."""
        num_heads = 1 + shape.has_keys
        if self.whole_qk_norm:
            num_heads = self.num_heads + shape.heads.num_kv_heads
        num = num_heads * shape.heads.head_dim * self.qk_norm
        num += shape.qkv_size * self.qkv_bias + self.hidden_size * self.output_bias
        return num + self.num_heads * self.attention_sinks

    @property
    def num_token_weights(self) -> int:
        """Elements of the matrices that a token is multiplied with, but for the output layer."""
        num = sum(map(self._num_matrix_weights, range(self.num_layers)))
        if self.per_layer_inputs is not None:
            num += self.per_layer_inputs.num_projection_weights(self.num_layers, self.hidden_size)
        if self.experts is not None:
            each, size = self.experts.num_per_token, self.experts.intermediate_size
            of_layer = self.hidden_size * (self.experts.num_experts + 3 * each * size)
            of_layer += self.experts.num_shared_weights(self.hidden_size)
            num += self.experts.num_layers * of_layer
        if self.delta_net is not None:
            num += self.delta_net.num_layers * self.delta_net.num_products_per_token
        return num

    @property
    def num_step_weights(self) -> int:
        """Elements that every step reads: all but experts, and the embedding, unless it is the
        output layer too."""
        layers, hidden = range(self.num_layers), self.hidden_size
        num = sum(self._num_matrix_weights(i) + self._num_vector_weights(i) for i in layers)
        if self.experts is not None:
            of_all = self.experts.num_router_weights(hidden)
            of_all += self.experts.num_shared_weights(hidden)
            num += self.experts.num_layers * of_all
        if self.per_layer_inputs is not None:
            num += self.per_layer_inputs.num_projection_weights(self.num_layers, hidden)
            num += self.per_layer_inputs.size  # a norm
        return num + hidden * (self.vocab_size + 1)

    @property
    def num_expert_weights(self) -> int:
        """Elements of all experts."""
        experts = self.experts
        if experts is None:
            return 0
        return experts.num_layers * experts.num_experts * experts.num_weights(self.hidden_size)

    @property
    def num_parameters(self) -> int:
        num = self.num_step_weights + self.num_expert_weights + self._num_embedding_weights
        if self.per_layer_inputs is not None:
            num += self.per_layer_inputs.num_table_weights(self.num_layers)
        return num

    @property
    def _num_embedding_weights(self) -> int:
        return 0 if self.tied_embeddings else self.vocab_size * self.hidden_size

    def table_bytes(self, dtype_bytes: int) -> int:
        """Of the table of `per_layer_inputs`, which a GPU has in its memory."""
        if self.per_layer_inputs is None:
            return 0
        return self.per_layer_inputs.num_table_weights(self.num_layers) * dtype_bytes

    def weight_bytes(self, dtype_bytes: int, kept: KeptBytes | None = None) -> int:
        """Of all weights, before any is read: what a device needs for them, without the table of
        `per_layer_inputs`, which stays in its file on a processor.

        dtype_bytes: of the type in which they are computed. kept: None where all layers stay as
        they are stored.
        """
        read = self.step_weight_bytes(dtype_bytes, kept) + self.expert_bytes(dtype_bytes, kept)
        return read + self._num_embedding_weights * dtype_bytes

    def step_weight_bytes(self, dtype_bytes: int, kept: KeptBytes | None = None) -> int:
        """Of the weights that every step reads, as `ModelInfo.weight_bytes`."""
        saved = self._saved_bytes(dtype_bytes, kept, are_experts=False)
        return self.num_step_weights * dtype_bytes - saved

    def expert_bytes(self, dtype_bytes: int, kept: KeptBytes | None = None) -> int:
        """Of all experts."""
        saved = self._saved_bytes(dtype_bytes, kept, are_experts=True)
        return self.num_expert_weights * dtype_bytes - saved

    @property
    def weight_formats(self) -> frozenset[str]:
        """Of the linear layers that are quantized in the checkpoint."""
        return frozenset(scheme.weight_format for _, scheme, _ in self.quantized_layers())

    def _saved_bytes(self, dtype_bytes: int, kept: KeptBytes | None, *, are_experts: bool) -> int:
        """How many fewer bytes the layers have that are quantized."""
        saved = 0
        for name, scheme, (rows, columns) in self.quantized_layers():
            if (".experts." in name) is not are_experts:
                continue
            held = scheme.num_bytes(rows, columns) if kept is None else kept(scheme, rows, columns)
            if held is not None:
                saved += rows * columns * dtype_bytes - held
        return saved

    def has_widened(self, kept: KeptBytes) -> bool:
        """Whether any layer that is quantized becomes plain."""
        return any(kept(scheme, *shape) is None for _, scheme, shape in self.quantized_layers())

    def quantized_layers(self) -> Iterator[tuple[str, Scheme, tuple[int, int]]]:
        """The name, scheme and shape of each matrix that config.json says is quantized."""
        if self.quantization is not None:
            for name, shape in self._linears():
                scheme = self.quantization.scheme_of_part(name, shape)
                if scheme is not None:
                    yield name, scheme, shape

    def _linears(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """The name and shape of each matrix but the embedding and routers."""
        for index in range(self.num_layers):
            for name, shape in self.linear_shapes(index).items():
                yield f"model.layers.{index}.{name}", shape
        if self.per_layer_inputs is not None:
            shape = self.per_layer_inputs.projection_shape(self.num_layers, self.hidden_size)
            yield PROJECTION, shape
        if not self.tied_embeddings:
            yield "lm_head", (self.vocab_size, self.hidden_size)

    @classmethod
    def from_dir(cls, model_dir: Path) -> "ModelConfig":
        """Reads config.json, and generation_config.json where there is one.

        model_dir: or a GGUF file.
        """
        outer = Fields.read(model_dir / "config.json")
        name, text = find_family(outer)
        family = FAMILIES[name]
        is_wrapped = text is not outer
        fields = text.with_defaults(family.defaults)
        quantization = read_quantization(outer, model_dir)
        if is_wrapped and quantization is not None:
            quantization = quantization.renamed(text_model_name)
        _check_activation(fields, family.activation)
        if not fields.flag("is_causal", default=True):
            raise InvalidModel(
                f"{fields.path} has is_causal: false, so tokens also attend to later ones, which "
                "is not supported; use a model with causal attention"
            )
        num_layers = fields.count("num_hidden_layers", most=_MAX_LAYERS)
        num_heads = fields.count("num_attention_heads", most=_MAX_HEADS)
        num_kv_heads = fields.count("num_key_value_heads", default=num_heads, most=_MAX_HEADS)
        hidden_size = fields.count("hidden_size", most=MAX_WIDTH)
        head_dim = fields.count("head_dim", default=hidden_size // num_heads, most=_MAX_HEAD_DIM)
        check_neutral(fields, family.computes)
        vocab_size = fields.count("vocab_size", most=_MAX_VOCABULARY)
        if num_heads % num_kv_heads:
            raise InvalidModel(
                f"{fields.path}: num_attention_heads ({num_heads}) must be a multiple of "
                f"num_key_value_heads ({num_kv_heads})"
            )
        if head_dim % 2:
            raise InvalidModel(
                f"{fields.path}: head_dim is {head_dim}; it must be even, because rotary positions "
                "rotate pairs of dimensions"
            )
        windows = family.windows(fields, num_layers)
        flags = {
            "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
            "activation": family.activation,
            **family.ropes(fields, Head(head_dim, windows)),
            **family.flags(fields),
        }
        if is_number(flags.get("attention_scale"), head_dim**-0.5):
            del flags["attention_scale"]
        config = cls(
            family=name,
            is_wrapped=is_wrapped,
            has_fused_names=family.has_fused_names,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=_intermediate_size(fields, flags.get("experts")),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_model_len=longest_sequence(fields, flags["rope"]),
            windows=windows,
            tied_embeddings=_has_tied_embeddings(outer, fields, model_dir)
            if is_wrapped
            else fields.flag("tie_word_embeddings"),
            eos_token_ids=eos_token_ids(
                fields if outer.get("eos_token_id") is None else outer,
                model_dir / "generation_config.json",
                vocab_size,
            ),
            quantization=quantization,
            **flags,
        )
        check_keys(fields, family.without_effect, head_dim=head_dim, has_encoders=False)
        if is_wrapped:
            check_keys(outer, family.without_effect, head_dim=head_dim, has_encoders=True)
        return config


def _intermediate_size(fields: Fields, experts: ExpertsConfig | None) -> int:
    """0 where no layer has one MLP, and none is given."""
    if experts is not None and all(experts.layers) and fields.get("intermediate_size") is None:
        return 0
    return fields.count("intermediate_size", most=MAX_WIDTH)


def _check_activation(fields: Fields, activation: str) -> None:
    for name in ("hidden_act", "hidden_activation"):
        if fields.text(name) not in (*_ACTIVATIONS[activation], None):
            raise InvalidModel(
                f"{fields.path} has {name} {shown(fields.get(name))}; only "
                f"{_ACTIVATIONS[activation][0]!r} is supported for this architecture"
            )


def _has_tied_embeddings(outer: Fields, text: Fields, model_dir: Path) -> bool:
    """Of a model of text and images, whose two parts of config.json often contradict each other:
    the weights decide, where they are there."""
    default = outer.flag("tie_word_embeddings", default=text.flag("tie_word_embeddings"))
    names = tensor_names(model_dir)
    if names is None:
        return default
    return not any(name.endswith("lm_head.weight") for name in names)


def eos_token_ids(config: Fields, path: Path, vocab_size: int) -> tuple[int, ...]:
    """Every id that ends the output: from generation_config.json, or else from config.json."""
    generation = Fields(path, read_object(path))
    of_config, of_generation = _token_ids(config), _token_ids(generation)
    ids = of_config if of_generation is None else of_generation
    # The model cannot generate others; some fine-tunes name a token that was never added.
    if unknown := [token_id for token_id in ids or () if token_id >= vocab_size]:
        logger.warning(
            "eos_token_id %s of %s is outside of the vocabulary of %d tokens, and has no effect",
            shown(unknown[0]),
            path.parent,
            vocab_size,
        )
    return tuple(token_id for token_id in ids or () if token_id < vocab_size)


def _token_ids(fields: Fields) -> list[int] | None:
    """Those of eos_token_id; None if it is absent."""
    ids = fields.get("eos_token_id")
    if ids is None:
        return None
    each = ids if isinstance(ids, list) else [ids]
    for token_id in each:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise fields.wrong("eos_token_id", "a token id or a list of them", ids)
    return each


# Far more than any model has: absurd sizes are refused before anything is allocated for them.
_MAX_LAYERS = 10_000
_MAX_HEADS = 2**16
_MAX_HEAD_DIM = 2**16
_MAX_VOCABULARY = 2**24
# The names that config.json has for each.
_ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh", "gelu_tanh")}
