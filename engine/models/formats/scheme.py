"""`Scheme`: how a file stores one linear layer. Imports no tensors.

Bytes are those of the layer that is read: scales count as float16 where most checkpoints have such,
and as float32 where the format implies it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from math import gcd
from typing import TYPE_CHECKING, Any, ClassVar, Self

from penstock.engine.models.layers.weight_formats import LEVELS_FORMAT, CodedLayout, integer_format

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from penstock.engine.models.formats.tensors import LayerTensors
    from penstock.engine.models.layers.linear import JoinableLinear, StoredLinear

FLOAT16_BYTES = 2
FLOAT32_BYTES = 4


class Scheme(ABC):
    @property
    @abstractmethod
    def weight_format(self) -> str:
        """The format of the layer that it is read as: see `Linear`."""

    @abstractmethod
    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Returns the bytes of that layer, without its bias."""

    @abstractmethod
    def gpu_layout(self, in_features: int) -> CodedLayout | None:
        """Returns the layout that a GPU has of its codes; None where no kernel reads them."""


# Returns the bytes, without its bias, that a layer of such a scheme, out_features and in_features
# takes where it is computed; None where it becomes plain. See `CodePolicy`.
KeptBytes = Callable[[Scheme, int, int], int | None]


class TensorScheme(Scheme):
    """How the tensors of a safetensors file store a layer."""

    @property
    @abstractmethod
    def columns_of_scale(self) -> int | None:
        """How many columns share a scale; None for all of a row."""

    @abstractmethod
    def divided(self, rows: int, columns: int) -> Self:
        """Returns that of one of equal parts of a matrix, whose groups and blocks end where it
        ends: see `Cut`. rows, columns: of the part; 0 where it has all."""

    @property
    def _layer(self) -> Any:
        """The module `layer` of the format's room, which has tensors."""
        return import_module(f"{type(self).__module__.rpartition('.')[0]}.layer")

    def read(self, tensors: "LayerTensors") -> "JoinableLinear":
        """Returns the layer without its bias. Raises InvalidModel."""
        layer: JoinableLinear = self._layer.read(tensors, self)
        return layer

    def made_up(
        self, shape: tuple[int, int], bias: "Tensor | None", std: float, generator: "Generator"
    ) -> "StoredLinear":
        """Returns a layer of as many bytes as one that is read, on the generator's device, whose
        values have this standard deviation."""
        layer: StoredLinear = self._layer.made_up(self, shape, bias, std, generator)
        return layer


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedScheme(TensorScheme):
    """Codes of 8 or 4 bits with a scale for each group, which become a `GroupedLinear`. group_size:
    columns; None for one scale a row. levels: what codes stand for, if not integers."""

    group_size: int | None
    bits: int = 4
    has_zeros: bool = False
    levels: ClassVar[tuple[int, ...] | None] = None

    @property
    def weight_format(self) -> str:
        return LEVELS_FORMAT if self.levels else integer_format(self.bits, not self.has_zeros)

    @property
    def has_wide_scales(self) -> bool:
        """Whether scales are float32."""
        return False

    @property
    def columns_of_scale(self) -> int | None:
        return self.group_size

    def num_bytes(self, out_features: int, in_features: int) -> int:
        scale_bytes = FLOAT32_BYTES if self.has_wide_scales else FLOAT16_BYTES
        codes = out_features * -(-in_features * self.bits // 8)
        num_groups = out_features * -(-in_features // (self.group_size or in_features))
        return codes + (scale_bytes + self.has_zeros) * num_groups

    def gpu_layout(self, in_features: int) -> CodedLayout | None:
        return CodedLayout.fitting(
            self.bits,
            self.group_size or in_features,
            in_features,
            has_zeros=self.has_zeros,
            has_halves=not self.has_wide_scales,
        )

    def divided(self, rows: int, columns: int) -> Self:
        if self.group_size is None:
            return self
        return replace(self, group_size=gcd(self.group_size, columns))

    def made_up(
        self, shape: tuple[int, int], bias: "Tensor | None", std: float, generator: "Generator"
    ) -> "StoredLinear":
        from penstock.engine.models.formats.tensors import made_up_grouped

        return made_up_grouped(self, shape, bias, std, generator)
