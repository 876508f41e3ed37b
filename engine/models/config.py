"""A model's config.json in one form for all families. Imports no tensors."""

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import ClassVar

from penstock.engine.config import ModelImpl
from penstock.engine.files.gguf.file import is_gguf
from penstock.engine.files.json_file import Fields, read_object, shown
from penstock.engine.files.safetensors import tensor_names, text_model_name
from penstock.engine.kernels.attention.shape import AttentionShape
from penstock.engine.memory.pool.kv_layout import KVLayout
from penstock.engine.memory.pool.kv_shape import KVHeads, KVShape
from penstock.engine.models.errors import InvalidModel, UnsupportedFeature
from penstock.engine.models.families.families import SERVED, find_family
from penstock.engine.models.families.keys import check_keys
from penstock.engine.models.families.outline import Family, Outline
from penstock.engine.models.families.pooled_heads import Dense, PooledHead, read_pooled_head
from penstock.engine.models.formats.config import QuantizationConfig
from penstock.engine.models.formats.parse import read_quantization
from penstock.engine.models.formats.scheme import KeptBytes, TensorScheme
from penstock.engine.models.parts.attention.config import Attention
from penstock.engine.models.parts.attention.rope import longest_sequence
from penstock.engine.models.parts.experts.config import Experts
from penstock.engine.models.parts.latent_attention.config import LatentAttention
from penstock.engine.models.parts.layer import Layer
from penstock.engine.models.parts.per_layer_inputs.config import PerLayerInputs
from penstock.engine.models.parts.tensors import Axis, LinearSpec, NormKind, Part, TensorTable
from penstock.engine.models.parts.vocabulary.config import Embedding, Head
from penstock.engine.step.model_info import RoutedExperts

logger = logging.getLogger(__name__)
# Before the number of a layer, in the names of its tensors.
LAYER = "model.layers."


def index_and_name(name: str) -> tuple[int | None, str]:
    """The number of the layer that a tensor is of, and its name within the layer; None and its
    name where it is of none."""
    if not name.startswith(LAYER):
        return None, name
    index, _, rest = name.removeprefix(LAYER).partition(".")
    return int(index), rest


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: an embedding, layers made of parts, and a head.

    is_wrapped: whether it is the text model of a model of text and images. norm: of all norms.
    per_layer_inputs: None where layers have no inputs of their own. quantization: None where all
    weights are plain. is_encoder: whether tokens attend to later ones. pooled: what passes the
    pooled state of a text on; None for nothing. generates: whether it has an output layer for it.
    """

    family: str
    is_wrapped: bool
    hidden_size: int
    max_model_len: int
    norm: NormKind
    embedding: Embedding
    layers: tuple[Layer, ...]
    head: Head
    eos_token_ids: tuple[int, ...]
    quantization: QuantizationConfig | None
    per_layer_inputs: PerLayerInputs | None = None
    is_encoder: bool = False
    pooled: PooledHead | None = None
    generates: bool = True
    model_impl: ClassVar[ModelImpl] = ModelImpl.PENSTOCK

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def vocab_size(self) -> int:
        return self.embedding.vocab_size

    @property
    def attentions(self) -> list[Attention | LatentAttention]:
        """Those of the layers that have attention."""
        return [layer.attention for layer in self.layers if layer.attention is not None]

    @property
    def num_heads(self) -> int:
        """How many heads attend in each layer with attention; 0 where none has any."""
        return max((attention.num_heads for attention in self.attentions), default=0)

    @property
    def longest(self) -> int:
        """What max_model_len can be raised to."""
        ropes = (each.rope.longest for each in self.attentions if each.rope is not None)
        return max(self.max_model_len, *ropes, 0)

    def rotates_otherwise(self, max_model_len: int) -> bool:
        """Whether keys have other bytes if sequences may be so long."""
        return any(each.rope and each.rope.depends_on(max_model_len) for each in self.attentions)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(layer.window for layer in self.layers)

    @property
    def features(self) -> frozenset[str]:
        """In what its parts differ from Llama's, for people to read."""
        found = {"wide_norms"} if self.norm.is_wide else set()
        if self.norm.is_centred:
            found.add("centred_norms")
        if self.norm.offset:
            found.add("norm_offset")
        if len({attention.heads for attention in self.attentions}) > 1:
            found.add("heads_by_layer")
        if len({attention.rope for attention in self.attentions}) > 1:
            found.add("ropes_by_layer")
        if len({layer.mlp.size for layer in self.layers if layer.mlp is not None}) > 1:
            found.add("mlps_by_layer")
        return frozenset(found).union(
            *(part.features for part in self._outer_parts), *(each.features for each in self.layers)
        )

    @property
    def _outer_parts(self) -> tuple[Part, ...]:
        inputs = () if self.per_layer_inputs is None else (self.per_layer_inputs,)
        return (self.embedding, *inputs, self.head)

    @cached_property
    def tensors(self) -> TensorTable:
        """Those outside of layers."""
        return TensorTable(self._outer_parts)

    def axes_of(self, name: str) -> tuple[tuple[Axis, ...], Axis | None]:
        """The rows and columns of a tensor of the checkpoint, or of a linear layer, by its name;
        none where no part declares it."""
        index, rest = index_and_name(name)
        table = self.tensors if index is None else self.layers[index].tensors
        return table.axes.get(rest, ((), None))

    @property
    def tables(self) -> Iterator[tuple[str, TensorTable]]:
        """Yields all tensors, each with what comes before their names: those of layers last."""
        yield "", self.tensors
        for index, layer in enumerate(self.layers):
            yield f"{LAYER}{index}.", layer.tensors

    @property
    def axes(self) -> Iterator[Axis]:
        """The dimensions that ranks divide."""
        for _, table in self.tables:
            for rows, columns in table.axes.values():
                yield from (axis for axis in (*rows, columns) if axis and axis.key)

    def divided(self, num_ranks: int) -> "ModelConfig":
        """Returns one rank's part of so many. Its vocab_size is the same on all, and all together
        may have a few ids more than there are."""
        own = {layer: layer.divided(num_ranks) for layer in set(self.layers)}
        return replace(
            self,
            embedding=self.embedding.divided(num_ranks),
            layers=tuple(own[layer] for layer in self.layers),
            head=self.head.divided(num_ranks),
            quantization=self.quantization and replace(self.quantization, num_ranks=num_ranks),
        )

    def check_parts(self, path: str, lacks: Callable[[Part], Collection[str]]) -> None:
        """path: through the model, its name in error messages. lacks: what that does not compute of
        a part, in words. Raises UnsupportedFeature."""
        parts = {part for layer in set(self.layers) for part in layer.parts}
        if missing := {name for part in parts for name in lacks(part)}:
            raise UnsupportedFeature(missing, path)

    def part(self, layers: range) -> "ModelConfig":
        """The model of these layers alone, which count from 0."""
        return replace(
            self,
            layers=self.layers[layers.start : layers.stop],
            per_layer_inputs=self.per_layer_inputs
            and replace(self.per_layer_inputs, num_layers=len(layers)),
            quantization=self.quantization and replace(self.quantization, first_layer=layers.start),
        )

    @property
    def kv_shape(self) -> KVShape:
        heads = tuple(
            KVHeads(0, self.head_dim) if layer.attention is None else layer.attention.heads
            for layer in self.layers
        )
        if all(attention.has_keys for attention in self.attentions):
            return KVShape(heads)
        return KVShape(heads, tuple(map(self._kv_source, range(self.num_layers))))

    @property
    def head_dim(self) -> int:
        """The most that a head has; 0 where no layer has attention."""
        return max((attention.head_dim for attention in self.attentions), default=0)

    def _kv_source(self, layer: int) -> int:
        """The layer whose keys and values it reads."""
        attention = self.layers[layer].attention
        if attention is None or attention.has_keys:
            return layer
        return max(
            index
            for index, each in enumerate(self.layers[:layer])
            if each.attention is not None
            and each.attention.has_keys
            and each.window == attention.window
        )

    @property
    def recurrent(self) -> tuple[bool, ...]:
        """For each layer whether it has a recurrence."""
        return tuple(layer.is_recurrent for layer in self.layers)

    def kv_layout(self, max_model_len: int) -> KVLayout:
        num_recurrent = sum(self.recurrent)
        mixer = next((layer.mixer for layer in self.layers if layer.is_recurrent), None)
        state = None if mixer is None else mixer.state_shape(num_recurrent)
        recurrent = self.recurrent if num_recurrent else ()
        # An encoder has no keys and values but those of a step, which it reads as a whole.
        windows = (None,) * self.num_layers if self.is_encoder else self.windows
        return KVLayout.of(windows, max_model_len, recurrent, state)

    def attention_windows(self, block_size: int) -> dict[AttentionShape, set[int | None]]:
        """Those that layers of each shape have; not of layers with a recurrence."""
        found: dict[AttentionShape, set[int | None]] = {}
        for attention in self.attentions:
            shape = AttentionShape(
                num_heads=attention.num_heads,
                num_kv_heads=attention.num_kv_heads,
                head_dim=attention.head_dim,
                block_size=block_size,
                latent_dim=attention.heads.latent_dim,
            )
            found.setdefault(shape, set()).add(attention.window)
        return found

    @property
    def experts(self) -> Experts | None:
        """Those of each layer that has some; None where none has."""
        return next((layer.experts for layer in self.layers if layer.experts is not None), None)

    def routed(self, num_bytes: int) -> RoutedExperts | None:
        """num_bytes: of all experts of all layers."""
        experts = self.experts
        if experts is None:
            return None
        num_layers = sum(layer.experts is not None for layer in self.layers)
        return RoutedExperts(
            num_layers=num_layers,
            num_experts=experts.num_experts,
            num_experts_per_token=experts.num_per_token,
            expert_bytes=num_bytes // (num_layers * experts.num_experts),
        )

    @property
    def num_token_weights(self) -> int:
        """Elements of the matrices that a token is multiplied with, but for the output layer."""
        inputs = self.per_layer_inputs
        of_inputs = 0 if inputs is None else TensorTable((inputs,)).num_products()
        return of_inputs + sum(layer.num_products for layer in self.layers)

    @property
    def num_step_weights(self) -> int:
        """Elements that every step reads: all but experts, and the embedding, unless it is the
        output layer too."""
        num = sum(table.num_step_weights() for _, table in self.tables)
        return num - self.vocab_size * self.hidden_size

    @property
    def num_expert_weights(self) -> int:
        """Elements of all experts."""
        return sum(layer.tensors.num_routed_weights() for layer in self.layers)

    @property
    def num_parameters(self) -> int:
        num = self.num_step_weights + self.num_expert_weights
        return num + self._num_gathered_weights + self.table_bytes(1)

    @property
    def _num_gathered_weights(self) -> int:
        """Elements of the embedding; 0 where it is the output layer too."""
        return 0 if self.head.is_tied else self.vocab_size * self.hidden_size

    def table_bytes(self, dtype_bytes: int) -> int:
        """The bytes of the table of `per_layer_inputs`, which a GPU has in its memory."""
        inputs = self.per_layer_inputs
        return 0 if inputs is None else prod(inputs.table_shape) * dtype_bytes

    def weight_bytes(self, dtype_bytes: int, kept: KeptBytes | None = None) -> int:
        """The bytes of all weights, before any is read: what a device needs for them, without the
        table of `per_layer_inputs`, which stays in its file on a processor.

        dtype_bytes: of the type in which they are computed. kept: None where all layers stay as
        they are stored.
        """
        read = self.step_weight_bytes(dtype_bytes, kept) + self.expert_bytes(dtype_bytes, kept)
        return read + self._num_gathered_weights * dtype_bytes

    def step_weight_bytes(self, dtype_bytes: int, kept: KeptBytes | None = None) -> int:
        """The bytes of the weights that every step reads, as `ModelInfo.weight_bytes`."""
        saved = self._saved_bytes(dtype_bytes, kept, are_routed=False)
        return self.num_step_weights * dtype_bytes - saved

    def expert_bytes(self, dtype_bytes: int, kept: KeptBytes | None = None) -> int:
        """The bytes of all experts."""
        saved = self._saved_bytes(dtype_bytes, kept, are_routed=True)
        return self.num_expert_weights * dtype_bytes - saved

    @property
    def weight_formats(self) -> frozenset[str]:
        """The formats of the linear layers that are quantized in the checkpoint."""
        return frozenset(scheme.weight_format for _, scheme, *_ in self.quantized_layers())

    def _saved_bytes(self, dtype_bytes: int, kept: KeptBytes | None, *, are_routed: bool) -> int:
        """How many fewer bytes the layers have that are quantized."""
        saved = 0
        for _, scheme, (rows, columns), linear in self.quantized_layers():
            if (linear.num_used is not None) is not are_routed or linear.is_widened:
                continue
            held = scheme.num_bytes(rows, columns) if kept is None else kept(scheme, rows, columns)
            if held is not None:
                saved += rows * columns * dtype_bytes - held
        return saved

    def has_widened(self, kept: KeptBytes) -> bool:
        """Whether any layer that is quantized becomes plain."""
        return any(kept(scheme, *shape) is None for _, scheme, shape, _ in self.quantized_layers())

    def quantized_layers(
        self,
    ) -> Iterator[tuple[str, TensorScheme, tuple[int, int], LinearSpec]]:
        """The name, scheme and shape of each matrix that config.json says is quantized, and the
        layer that has it."""
        if self.quantization is not None:
            for name, shape, linear in self.quantizable():
                scheme = self.quantization.scheme_of_part(name, shape)
                if scheme is not None:
                    yield name, scheme, shape, linear

    def quantizable(self) -> Iterator[tuple[str, tuple[int, int], LinearSpec]]:
        """The name and shape of each matrix that a checkpoint may quantize, and the layer that has
        it."""
        for prefix, table in self.tables:
            for name, shape, linear in table.quantizable():
                yield prefix + name, shape, linear

    @classmethod
    def from_dir(cls, model_dir: Path) -> "ModelConfig":
        """Reads config.json and, where there is one, generation_config.json; or a GGUF file's."""
        outer = Fields.read(model_dir / "config.json")
        name, text = find_family(outer)
        family = SERVED[name]
        is_wrapped = text is not outer
        fields = text.with_defaults(family.defaults)
        quantization = read_quantization(outer, model_dir)
        if is_wrapped and quantization is not None:
            quantization = quantization.renamed(text_model_name)
        outline = Outline(fields, family)
        design, (layers, rope) = outline.design, outline.layers()
        is_encoder = design.attention.get("is_two_sided", False)
        _check_kind(fields, family, is_encoder=is_encoder)
        is_tied = _has_tied_embeddings(outer, fields, model_dir, is_wrapped)
        pooled = None
        if not is_gguf(model_dir):
            table = "model.embed_tokens" if is_tied else "lm_head"
            shape = (outline.sizes["vocab_size"], outline.sizes["hidden_size"])
            output = Dense(name=table, shape=shape, has_bias=False)
            pooled = read_pooled_head(fields, model_dir, name, output)
        named = (outer.names("architectures") or [""])[0]
        is_bare = named.endswith("Model") and named != family.architecture
        generates = not (is_encoder or is_bare or (pooled is not None and pooled.labels))
        head = Head(
            **outline.sizes,
            **{"is_tied": is_tied or not generates, **design.head},
            multiplier=design.logit_multiplier,
            softcap=design.logit_softcap,
        )
        config = cls(
            family=name,
            is_wrapped=is_wrapped,
            hidden_size=head.hidden_size,
            max_model_len=longest_sequence(fields, rope)
            - design.embedding.get("first_position", 0),
            norm=replace(design.norm, eps=design.norm.eps or fields.number("rms_norm_eps", 1e-6)),
            embedding=Embedding(
                **outline.sizes, **design.embedding, multiplier=design.embedding_multiplier
            ),
            layers=layers,
            head=head,
            eos_token_ids=eos_token_ids(
                fields if outer.get("eos_token_id") is None else outer,
                model_dir / "generation_config.json",
                head.vocab_size,
            ),
            quantization=quantization,
            per_layer_inputs=design.per_layer_inputs,
            is_encoder=is_encoder,
            pooled=pooled,
            generates=generates,
        )
        for each in (fields, outer) if is_wrapped else (fields,):
            check_keys(each, family.without_effect, outline.head_dim, has_encoders=each is outer)
        return config


def _check_kind(fields: Fields, family: Family, *, is_encoder: bool) -> None:
    """Raises InvalidModel: for another activation than the family's, or attention to later tokens
    in a decoder."""
    activation = family.activation
    for name in ("hidden_act", "hidden_activation"):
        if fields.text(name) not in (*_ACTIVATIONS[activation], None):
            raise InvalidModel(
                f"{fields.path} has {name} {shown(fields.get(name))}; only "
                f"{_ACTIVATIONS[activation][0]!r} is supported for this architecture"
            )
    if not (is_encoder or fields.flag("is_causal", default=True)):
        raise InvalidModel(
            f"{fields.path} has is_causal: false, so tokens also attend to later ones, which is "
            "not supported; use a model with causal attention"
        )


def _has_tied_embeddings(outer: Fields, text: Fields, model_dir: Path, is_wrapped: bool) -> bool:
    """Tells if embeddings are tied. For text and images, config.json's parts often disagree: the
    weights decide, where they are there."""
    if not is_wrapped:
        return text.flag("tie_word_embeddings")
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


# The names that config.json has for each.
_ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_tanh"),
    "gelu": ("gelu",),
}
