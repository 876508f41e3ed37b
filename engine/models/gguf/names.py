"""Where a GGUF file has the tensors that the parts of a model declare, by the names that these have
in Hugging Face's checkpoints. Imports no tensors."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from math import prod
from typing import Any

from penstock.engine.files.gguf.architectures import ARCHITECTURES, num_drafting
from penstock.engine.files.gguf.file import GgufFile
from penstock.engine.files.gguf.keys import Keys
from penstock.engine.files.gguf.rope import ROPE_TENSORS
from penstock.engine.files.gguf.settings import architecture_name
from penstock.engine.models.config import LAYER, ModelConfig
from penstock.engine.models.layers.weight_formats import Spans
from penstock.engine.models.parts.delta_net.config import DeltaNet
from penstock.engine.models.parts.latent_attention.config import LatentAttention
from penstock.engine.models.parts.per_layer_inputs.config import TABLE
from penstock.engine.models.parts.tensors import Axis, LinearSpec, MatrixSpec, VectorSpec

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
_HEAD = "lm_head.weight"
PER_LAYER_TABLE = "per_layer_token_embd.weight"

# Besides those that a model computes with, and those that are read with the metadata: frequencies
# of rotary positions, which older files have, and what NVFP4's activations would be divided by.
_UNUSED = r"blk\.\d+\.attn_rot_embd(\.weight)?|.*\.input_scale"
_PERMUTED = ("attn_q", "attn_k")
# The decays of a delta net's heads are in the file as minus the exponential of the checkpoint's.
_DECAY = "ssm_a"
_VALUE_HEADS = "linear_num_value_heads"
# One tensor that a file may have for those of a linear layer, one after the other.
_FUSED = {
    ("attn_q", "attn_k", "attn_v"): "attn_qkv",
    ("ffn_gate_exps", "ffn_up_exps"): "ffn_gate_up_exps",
}
# What would make keys and values of latents, in one tensor or in two.
_EXPANSION, _APART = "attn_kv_b", ("attn_k_b", "attn_v_b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Some rows of a tensor of the file, all of whose dimensions but the last are rows; or some
    numbers of a vector.

    shape: of the tensor that they are in Hugging Face's checkpoint. first: the row that they begin
    with. head_dim: where the rows of each head are permuted, and None elsewhere. rows, columns: the
    places of the checkpoint's, one after the other; None where that is the file's order. offset: by
    how much the file's numbers exceed those of the checkpoint. is_decay: they are minus the
    exponential of those. scale: the tensor, and the number in it, by which they are multiplied.
    values: the tensor of what makes a head's values of a latent, which come after what makes its
    keys, of all heads; that is transposed in the file.
    """

    tensor: str
    shape: tuple[int, ...]
    first: int = 0
    head_dim: int | None = None
    rows: Spans | None = None
    columns: Spans | None = None
    offset: float = 0.0
    is_decay: bool = False
    scale: tuple[str, int] | None = None
    values: str | None = None


class GgufNames:
    """The places of one model's tensors."""

    def __init__(self, config: ModelConfig, gguf: GgufFile) -> None:
        """Raises InvalidModel for an architecture that is not supported."""
        self._architecture = ARCHITECTURES[architecture_name(gguf)]
        self._config, self._found = config, gguf.tensors.keys()
        self._num_drafting = num_drafting(Keys(gguf, architecture_name(gguf)))
        mixers = [layer.mixer for layer in config.layers if self._architecture.tiles_heads]
        nets = [mixer for mixer in mixers if isinstance(mixer, DeltaNet)]
        self._num_key_heads = nets[0].num_key_heads if nets else None
        latents = [each.mixer for each in config.layers if isinstance(each.mixer, LatentAttention)]
        self._nope_dim = latents[0].nope_dim if latents else 0
        self._places: dict[str, Place] = {}
        self._vectors: set[str] = set()
        self.shapes: dict[str, tuple[int, ...]] = {}
        """By the names in the file, of all that it must have: (rows, columns), or (numbers,)."""
        self.stacks: list[tuple[str, ...]] = []
        """The tensors of each linear layer that may have codes, by their names in the file."""
        if (inputs := config.per_layer_inputs) is not None:
            self._add(f"{TABLE}.weight", PER_LAYER_TABLE, inputs.table_shape)
        for prefix, table in config.tables:
            for vector in table.vectors:
                if vector.gguf:
                    self._add_vector(prefix, vector)
            for linear in table.linears:
                self._add_linear(prefix, linear)

    def place_of(self, name: str) -> Place:
        """name: as transformers has it, such as "model.layers.0.mlp.up_proj.weight"."""
        return self._places[name]

    def is_unused(self, tensor: str) -> bool:
        """Whether a tensor of the file has no effect."""
        layer = re.match(r"blk\.(\d+)\.", tensor)
        if layer and 0 <= int(layer[1]) - self._config.num_layers < self._num_drafting:
            return True
        unused = (_UNUSED, self._architecture.unused)
        return tensor in ROPE_TENSORS or any(re.fullmatch(each, tensor) for each in unused)

    def places(self) -> Iterator[tuple[str, Place]]:
        """Yields them by name, but for what a tied embedding is used for besides."""
        for name, place in self._places.items():
            if not (name == _HEAD and self._config.head.is_tied):
                yield name, place

    def fits(self, tensor: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of the file may have this shape. Dimensions of 1 do not matter."""
        columns = self.shapes[tensor][1:]
        return self.shapes[tensor] == (prod(shape) // prod(columns), *columns) and (
            not columns or columns == shape[-1:]
        )

    def _add_vector(self, prefix: str, vector: VectorSpec) -> None:
        offset = self._config.norm.offset if vector.is_norm else 0.0
        kind, *ending = vector.gguf.split(".", 1)
        others = {"offset": offset, "is_decay": kind == _DECAY, "rows": self._order(vector.rows)}
        tensor = self._name(prefix, kind, *ending)
        self._vectors.add(tensor)
        self._add(prefix + vector.name, tensor, vector.shape, **others)

    def _add_linear(self, prefix: str, linear: LinearSpec) -> None:
        kinds = [kind for matrix in linear.matrices for kind in matrix.gguf]
        if kinds == ["output"] and self._config.head.is_tied:
            self._places[_HEAD] = self._places["model.embed_tokens.weight"]
            self.stacks.append((EMBEDDING,))
            return
        fused = _FUSED.get(tuple(kinds), "")
        is_fused = self._name(prefix, fused, "weight") in self._found
        if kinds == [_EXPANSION] and self._name(prefix, _EXPANSION, "weight") not in self._found:
            self._add_apart(prefix, linear.matrices[0])
            return
        for matrix in linear.matrices:
            rows, columns = self._order(matrix.rows), self._order((matrix.columns,))
            for name, kind in zip(matrix.names, cycle(matrix.gguf), strict=False):
                stored = fused if is_fused else kind
                is_permuted = self._architecture.is_permuted and kind in _PERMUTED
                head_dim = matrix.rows[0].width if is_permuted else None
                others = {"head_dim": head_dim, "rows": rows}
                shapes = {"weight": matrix.shape, "bias": matrix.shape[:1]}
                for ending in ("weight", "bias")[: 1 + linear.has_bias]:
                    tensor = self._name(prefix, stored, ending)
                    own: dict[str, Any] = {}
                    if ending == "weight":
                        own = {"columns": columns, "scale": self._scale(tensor)}
                    self._add(f"{prefix}{name}.{ending}", tensor, shapes[ending], **others, **own)
        if linear.is_quantizable and not linear.is_widened:
            weights = [f"{prefix}{name}.weight" for name in linear.names]
            found = (self._places[name].tensor for name in weights if name in self._places)
            self.stacks.append(tuple(dict.fromkeys(found)))

    def _add_apart(self, prefix: str, expansion: MatrixSpec) -> None:
        """Adds the two tensors that newer files have for it."""
        heads, (name,) = expansion.rows[0], expansion.names
        keys, values = (self._name(prefix, kind, "weight") for kind in _APART)
        latent_dim, value_dim = expansion.columns.size, heads.width - self._nope_dim
        self._places[f"{prefix}{name}.weight"] = Place(
            tensor=keys, shape=expansion.shape, values=values
        )
        self.shapes[keys] = heads.count * latent_dim, self._nope_dim
        self.shapes[values] = heads.count * value_dim, latent_dim

    def _add(self, name: str, tensor: str, shape: tuple[int, ...], **others: Any) -> None:
        """Adds rows, or numbers, after those that the tensor has already."""
        *rows, columns = shape if len(shape) > 1 else (*shape, 1)
        first, *_ = self.shapes.get(tensor, (0,))
        self._places[name] = Place(tensor=tensor, shape=shape, first=first, **others)
        self.shapes[tensor] = (first + prod(rows), columns)[: len(shape)]

    def _scale(self, tensor: str) -> tuple[str, int] | None:
        """Returns the number that multiplies the next matrix in a tensor, where the file has such,
        as beside NVFP4: one, or one of each expert."""
        name = tensor.removesuffix("weight") + "scale"
        if name not in self._found or name in self._vectors:
            return None
        index, *_ = self.shapes.get(name, (0,))
        self.shapes[name] = (index + 1,)
        return name, index

    def _name(self, prefix: str, kind: str, *ending: str) -> str:
        """Returns the name in the file. kind: as the parts declare it."""
        kind = self._architecture.renamed.get(kind, kind)
        return prefix.replace(LAYER, "blk.") + ".".join((kind, *ending))

    def _order(self, axes: Iterable[Axis]) -> Spans | None:
        """Returns where the rows, or columns, of these axes are; None where they are in order."""
        if not (keys := self._num_key_heads):
            return None
        begin, spans = 0, list[tuple[int, int]]()
        for axis in axes:
            is_tiled = axis.key == _VALUE_HEADS
            width, count = (axis.width, axis.count) if is_tiled else (axis.size, 1)
            order = [i * keys + key for key in range(keys) for i in range(count // keys)]
            starts = [begin + place * width for place in (order if is_tiled else [0])]
            spans += [(start, start + width) for start in starts]
            begin += axis.size
        return None if spans == sorted(spans) else tuple(spans)
