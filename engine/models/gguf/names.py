"""Where a GGUF file has the tensors that the parts of a model declare, by the names that these have
in Hugging Face's checkpoints. Imports no tensors."""

import re
from dataclasses import dataclass
from itertools import cycle
from math import prod
from typing import Any

from penstock.engine.files.gguf.architectures import ARCHITECTURES
from penstock.engine.files.gguf.file import GgufFile
from penstock.engine.files.gguf.rope import ROPE_TENSORS
from penstock.engine.files.gguf.settings import architecture_name
from penstock.engine.models.config import LAYER, ModelConfig
from penstock.engine.models.parts.per_layer_inputs.config import TABLE
from penstock.engine.models.parts.tensors import LinearSpec, VectorSpec

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
PER_LAYER_TABLE = "per_layer_token_embd.weight"

# Besides those that a model computes with, and those that are read with the metadata: frequencies
# of rotary positions, which older files have.
_UNUSED = r"blk\.\d+\.attn_rot_embd(\.weight)?"
_PERMUTED = ("attn_q", "attn_k")
# One tensor that a file may have for those of a linear layer, one after the other.
_FUSED = {
    ("attn_q", "attn_k", "attn_v"): "attn_qkv",
    ("ffn_gate_exps", "ffn_up_exps"): "ffn_gate_up_exps",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Some rows of a tensor of the file, all of whose dimensions but the last are rows; or some
    numbers of a vector.

    shape: of the tensor that they are in Hugging Face's checkpoint. first: the row that they begin
    with. head_dim: where the rows of each head are permuted, and None elsewhere. offset: by how
    much the file's numbers exceed those of the checkpoint.
    """

    tensor: str
    shape: tuple[int, ...]
    first: int = 0
    head_dim: int | None = None
    offset: float = 0.0


class GgufNames:
    """The places of one model's tensors."""

    def __init__(self, config: ModelConfig, gguf: GgufFile) -> None:
        """Raises InvalidModel for an architecture that is not supported."""
        self._architecture = ARCHITECTURES[architecture_name(gguf)]
        self._config, self._found = config, gguf.tensors.keys()
        self._places: dict[str, Place] = {}
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
        unused = (_UNUSED, self._architecture.unused)
        return tensor in ROPE_TENSORS or any(re.fullmatch(each, tensor) for each in unused)

    def fits(self, tensor: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of the file may have this shape. Dimensions of 1 do not matter."""
        columns = self.shapes[tensor][1:]
        return self.shapes[tensor] == (prod(shape) // prod(columns), *columns) and (
            not columns or columns == shape[-1:]
        )

    def _add_vector(self, prefix: str, vector: VectorSpec) -> None:
        offset = self._config.norm.offset if vector.is_norm else 0.0
        tensor = self._name(prefix, *vector.gguf.split(".", 1))
        self._add(prefix + vector.name, tensor, vector.shape, offset=offset)

    def _add_linear(self, prefix: str, linear: LinearSpec) -> None:
        kinds = [kind for matrix in linear.matrices for kind in matrix.gguf]
        if kinds == ["output"] and self._config.head.is_tied:
            self._places["lm_head.weight"] = self._places["model.embed_tokens.weight"]
            self.stacks.append((EMBEDDING,))
            return
        fused = _FUSED.get(tuple(kinds), "")
        is_fused = self._name(prefix, fused, "weight") in self._found
        for matrix in linear.matrices:
            for name, kind in zip(matrix.names, cycle(matrix.gguf), strict=False):
                stored = fused if is_fused else kind
                is_permuted = self._architecture.is_permuted and kind in _PERMUTED
                head_dim = matrix.rows[0].width if is_permuted else None
                shapes = {"weight": matrix.shape, "bias": matrix.shape[:1]}
                for ending in ("weight", "bias")[: 1 + linear.has_bias]:
                    tensor = self._name(prefix, stored, ending)
                    self._add(f"{prefix}{name}.{ending}", tensor, shapes[ending], head_dim=head_dim)
        if linear.is_quantizable:
            weights = [f"{prefix}{name}.weight" for name in linear.names]
            found = (self._places[name].tensor for name in weights if name in self._places)
            self.stacks.append(tuple(dict.fromkeys(found)))

    def _add(self, name: str, tensor: str, shape: tuple[int, ...], **others: Any) -> None:
        """Adds rows, or numbers, after those that the tensor has already."""
        *rows, columns = shape if len(shape) > 1 else (*shape, 1)
        first, *_ = self.shapes.get(tensor, (0,))
        self._places[name] = Place(tensor=tensor, shape=shape, first=first, **others)
        self.shapes[tensor] = (first + prod(rows), columns)[: len(shape)]

    def _name(self, prefix: str, kind: str, ending: str) -> str:
        """Returns the name in the file. kind: as the parts declare it."""
        kind = self._architecture.renamed.get(kind, kind)
        return f"{prefix.replace(LAYER, 'blk.')}{kind}.{ending}"
