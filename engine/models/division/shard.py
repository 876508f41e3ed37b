"""`Shard`: the part of a model that one of several ranks has, as Megatron-LM splits it
(arXiv:1909.08053).

The parts of the model declare which dimensions of their tensors are divided: attention and gated
delta nets by heads, MLPs and each expert by their intermediate size, embedding and output layer by
the vocabulary. So a layer's first matrices have some of the rows, its last ones some of the
columns, and the ranks' results add up to the layer's. Everything else is on all of them.
"""

from dataclasses import dataclass
from functools import cached_property
from math import gcd

import torch
from torch import Tensor

from penstock.engine.models.config import ModelConfig
from penstock.engine.models.errors import InvalidModel
from penstock.engine.models.formats.cut import CannotCut, Cut
from penstock.scheduler.errors import InvalidConfig

# A rank has at least so many columns of quantized weights per scale: as a word of 4 bits holds, and
# the fewest that a processor computes with their codes.
_LEAST_COLUMNS = 8


@dataclass(frozen=True)
class Shard:
    """model: the whole. rank: of `size`. Of one rank, the whole model."""

    model: ModelConfig
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        """Raises InvalidConfig for a model that cannot be split so."""
        size, flag = self.size, f"--tensor-parallel-size {self.size}"
        for name, count, is_shared in self._counts:
            if not _divides(count, size, is_shared=is_shared):
                wanted = f"a multiple of {size}"
                wanted = f"neither {wanted} nor a divisor" if is_shared else f"not {wanted}"
                raise InvalidConfig(
                    f"{flag}: this model's {name} is {count}, which is {wanted}; use "
                    f"{self._possible}"
                )
        for columns, width in sorted(self._coded):
            if not _keeps_groups(columns, width, size):
                raise InvalidConfig(
                    f"{flag}: a rank would have {columns // size} of the {columns} columns of a "
                    f"matrix whose weights are quantized, {width} of them with one scale; those of "
                    f"one scale must be divided into multiples of {_LEAST_COLUMNS}: use "
                    f"{self._possible}"
                )

    @cached_property
    def _counts(self) -> list[tuple[str, int, bool]]:
        """Lists the counts that ranks must divide: config.json's key, how many, and whether several
        ranks may have the same one."""
        axes = (axis for axis in self.model.axes if not axis.is_padded)
        counts = dict.fromkeys((axis.key or "", axis.count, axis.is_shared) for axis in axes)
        return sorted(counts, key=lambda count: count[2])

    @cached_property
    def _coded(self) -> frozenset[tuple[int, int]]:
        """The columns of quantized matrices whose columns are divided, and how many share a
        scale."""
        return frozenset(
            (columns, scheme.columns_of_scale or columns)
            for name, scheme, (_, columns), _ in self.model.quantized_layers()
            if self.cut(name).columns is not None
        )

    @property
    def _possible(self) -> str:
        """The numbers of ranks that divide what must be divided, and keep together what shares a
        scale."""
        sizes = [
            str(size)
            for size in range(1, 17)
            if all(_divides(n, size, is_shared=is_shared) for _, n, is_shared in self._counts)
            and all(_keeps_groups(*each, size) for each in self._coded)
        ]
        return " or ".join(sizes)

    @cached_property
    def config(self) -> ModelConfig:
        """This rank's part."""
        return self.model if self.size == 1 else self.model.divided(self.size)

    @property
    def first_id(self) -> int:
        """The first of this rank's part of the vocabulary."""
        return self.rank * self.config.vocab_size

    def splits(self, name: str) -> bool:
        """Whether ranks have different parts of this tensor."""
        return self.cut(name) != Cut()

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor of the checkpoint: a view, so that no more is read, but for
        what has to be padded. Raises InvalidModel where config.json implies another size."""
        cut = self.cut(name)
        try:
            tensor = cut.columns_of(cut.rows_of(tensor))
        except CannotCut as error:
            raise InvalidModel(f"the tensor {name!r} {error}") from None
        return tensor if self.adds(name) else tensor.new_zeros(()).expand(tensor.shape)

    def adds(self, name: str) -> bool:
        """Whether this rank's part is as the tensor: a bias that is added to what the ranks'
        products add up to is added once, and zeros by the others."""
        is_bias = name.endswith(".bias")
        return not (
            self.rank and is_bias and self.cut(name.removesuffix(".bias")).columns is not None
        )

    def slice_adapter(self, name: str, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of up @ down, a change of the matrix `name`: all ranks have one of the
        two, as they multiply it with what all have, or with what is summed after it."""
        cut, layout = self.cut(name), torch.contiguous_format
        if cut.rows is not None:
            up = self.of(name, up).clone(memory_format=layout)
        elif cut.columns is not None:
            down = self.of(name, down).clone(memory_format=layout)
        return down, up

    def cut(self, name: str) -> Cut:
        """This rank's part of a tensor, or of a linear layer, whatever tensors it is stored in."""
        rows, columns = self.model.axes_of(name)
        spans = (axis.span(self.rank, self.size) for axis in rows)
        own = tuple(span for span in spans if span is not None)
        return Cut(own or None, None if columns is None else columns.span(self.rank, self.size))


def _divides(count: int, size: int, *, is_shared: bool) -> bool:
    return count % size == 0 or (is_shared and size % count == 0)


def _keeps_groups(columns: int, width: int, size: int) -> bool:
    return columns % size == 0 and gcd(width, columns // size) % _LEAST_COLUMNS == 0
