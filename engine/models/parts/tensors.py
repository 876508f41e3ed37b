"""How a part declares its tensors. Reading, counting bytes and operations, division over ranks,
adapters, made-up weights and the names in GGUF files follow from it. Imports no tensors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import ClassVar, Self

from penstock.engine.memory.pool.state_shape import StateShape


@dataclass(frozen=True, slots=True)
class Span:
    """The part [begin, end) of a dimension of `whole`; beyond `whole` are zeros."""

    whole: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


class Stack(StrEnum):
    """The linear layers that LoRA adapters change, each stacked of some of a checkpoint's. What
    mixes tokens has the first, and a gated delta net the second beside it."""

    QKV = "qkv"
    GATES = "gates"
    OUTPUT = "output"
    GATE_UP = "gate_up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension of a tensor: `count` units of `width` elements each.

    key: what config.json calls the count, of which every rank has an equal part; None where all
    ranks have the whole dimension. is_shared: whether several ranks have the same unit if there are
    more ranks than units. is_padded: whether the last ranks have zeros where the count cannot be
    divided.
    """

    count: int
    width: int = 1
    key: str | None = None
    is_shared: bool = False
    is_padded: bool = False

    @property
    def size(self) -> int:
        return self.count * self.width

    def num_own(self, num_ranks: int) -> int:
        """How many units each rank has."""
        if self.key is None:
            return self.count
        if self.is_padded:
            return -(-self.count // num_ranks)
        return max(1, self.count // num_ranks) if self.is_shared else self.count // num_ranks

    def span(self, rank: int, num_ranks: int) -> Span | None:
        """The rank's part; None for the whole."""
        if self.key is None or num_ranks == 1:
            return None
        own = self.num_own(num_ranks) * self.width
        first = rank * own
        if self.is_shared:
            first = rank * self.count // num_ranks * self.width
        return Span(self.size, first, first + own)


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """Matrices of a checkpoint that are alike, (rows, columns) each.

    names: within the layer, without ".weight". rows: one axis for each matrix that is fused in one.
    gguf: what a GGUF file calls them within a layer, in turns: a name of one tensor each, or of one
    for all experts. Empty where no such file has them.
    """

    names: tuple[str, ...]
    rows: tuple[Axis, ...]
    columns: Axis
    gguf: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(axis.size for axis in self.rows)

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.columns.size


def matrix(name: str, rows: Axis, columns: Axis, gguf: str | None = None) -> MatrixSpec:
    """Returns one matrix that is not fused of several."""
    return MatrixSpec((name,), (rows,), columns, () if gguf is None else (gguf,))


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A linear layer, stacked of a checkpoint's matrices with the same columns.

    is_quantizable: not of what chooses experts, where a little error chooses others. adapters: the
    stack of LoRA adapters that change it, if any may. num_used: how many of its matrices a token is
    multiplied with, where a router chooses them; None for all. is_widened: whether it is made plain
    as it is read, whatever its weights are stored as.
    """

    matrices: tuple[MatrixSpec, ...]
    has_bias: bool = False
    is_quantizable: bool = True
    adapters: Stack | None = None
    num_used: int | None = None
    is_widened: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for matrix in self.matrices for name in matrix.names)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        rows = sum(matrix.num_rows * len(matrix.names) for matrix in self.matrices)
        return rows, self.matrices[0].columns.size

    @property
    def num_weights(self) -> int:
        """How many elements it has, biases included."""
        rows, columns = self.shape
        return rows * (columns + self.has_bias)

    @property
    def num_products(self) -> int:
        """How many elements a token is multiplied with."""
        rows, columns = self.shape
        if self.num_used is None:
            return rows * columns
        return rows * columns * self.num_used // len(self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormKind:
    """How all norms of a model are computed. offset: added to the weight, which is then, as where
    is_wide, multiplied in float32. is_centred: whether the mean is subtracted before (LayerNorm);
    a bias may be added then."""

    eps: float = 1e-6
    is_wide: bool = False
    offset: float = 0.0
    is_centred: bool = False


@dataclass(frozen=True, slots=True)
class VectorSpec:
    """A tensor that is no matrix: a norm, a scale, taps.

    name: within the layer, in full. rows: as of `MatrixSpec`. others: its further dimensions.
    gguf: its name within a layer of a GGUF file; empty where no such file has it. is_norm: whether
    it is computed with as the model's `NormKind` says; else in float32 if is_wide, or in the type
    of the model. has_bias: of a norm that is centred.
    """

    name: str
    rows: tuple[Axis, ...]
    others: tuple[int, ...] = ()
    gguf: str = ""
    is_norm: bool = False
    is_wide: bool = True
    has_bias: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(axis.size for axis in self.rows), *self.others)

    @property
    def num_weights(self) -> int:
        return prod(self.shape) * (1 + self.has_bias)

    @property
    def bias_name(self) -> str:
        return f"{self.name.removesuffix('.weight')}.bias"


class Part:
    """A part of a layer, or of the model: the base of its settings, which are a frozen dataclass.

    LLAMA: each field in which it may differ from Llama's, the value that Llama has, and the word of
    docs/families.md for others.
    """

    __slots__ = ()
    LLAMA: ClassVar[tuple[tuple[str, object, str], ...]] = ()

    @property
    def linears(self) -> Mapping[str, LinearSpec]:
        """Its linear layers, each by the name of the attribute that has it once it is read."""
        return {}

    @property
    def vectors(self) -> Mapping[str, VectorSpec]:
        """Its other tensors, by name likewise."""
        return {}

    def divided(self, num_ranks: int) -> Self:
        """Returns the part that each of so many ranks has."""
        return self

    @property
    def features(self) -> frozenset[str]:
        """The words for the fields in which it differs from Llama's."""
        return frozenset(word for name, value, word in self.LLAMA if getattr(self, name) != value)

    def state_shape(self, num_layers: int) -> StateShape | None:
        """Returns the recurrent state that a sequence has in so many layers with this part; None
        where it has none."""
        return None

    @property
    def num_state_products(self) -> int:
        """How many elements of its state a token is multiplied with."""
        return 0


class TensorTable:
    """All tensors of some parts, by their names within a layer, or within the model."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.linears: list[LinearSpec] = [each for part in parts for each in part.linears.values()]
        self.vectors: list[VectorSpec] = [each for part in parts for each in part.vectors.values()]

    @cached_property
    def axes(self) -> dict[str, tuple[tuple[Axis, ...], Axis | None]]:
        """The rows and columns that a tensor's name implies; of a linear layer also by the name of
        the layer. The bias of a matrix whose columns are divided has neither."""
        found: dict[str, tuple[tuple[Axis, ...], Axis | None]] = {}
        for vector in self.vectors:
            found[vector.name] = (vector.rows, None)
            if vector.has_bias:
                found[vector.bias_name] = (vector.rows, None)
        for matrix in self.matrices():
            for name in matrix.names:
                found[name] = found[f"{name}.weight"] = (matrix.rows, matrix.columns)
                found[f"{name}.bias"] = (matrix.rows, None)
        return found

    def matrices(self) -> Iterator[MatrixSpec]:
        for linear in self.linears:
            yield from linear.matrices

    def quantizable(self) -> Iterator[tuple[str, tuple[int, int], LinearSpec]]:
        """The name and shape of each matrix that a checkpoint may quantize, and whose it is."""
        for linear in self.linears:
            if linear.is_quantizable:
                for matrix in linear.matrices:
                    for name in matrix.names:
                        yield name, matrix.shape, linear

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The full name and the shape of every tensor of plain weights."""
        for vector in self.vectors:
            yield vector.name, vector.shape
            if vector.has_bias:
                yield vector.bias_name, vector.shape
        for linear in self.linears:
            for matrix in linear.matrices:
                for name in matrix.names:
                    yield f"{name}.weight", matrix.shape
                    if linear.has_bias:
                        yield f"{name}.bias", matrix.shape[:1]

    def num_step_weights(self) -> int:
        """How many elements every step reads: all but routed experts."""
        vectors = sum(vector.num_weights for vector in self.vectors)
        return vectors + sum(each.num_weights for each in self.linears if each.num_used is None)

    def num_routed_weights(self) -> int:
        return sum(each.num_weights for each in self.linears if each.num_used is not None)

    def num_products(self) -> int:
        return sum(each.num_products for each in self.linears)
