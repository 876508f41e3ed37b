"""`Cut`: some of the rows, or some of the columns, of a matrix of a checkpoint, however its tensors
store it."""

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from penstock.engine.models.parts.tensors import Span


class CannotCut(ValueError):
    """The message says why, without the tensor's name."""


@dataclass(frozen=True, slots=True)
class Cut:
    """rows: of each of the matrices that are fused in this one. None for all rows, or columns."""

    rows: tuple[Span, ...] | None = None
    columns: Span | None = None

    def num_rows(self, whole: int) -> int:
        """Returns the rows of the part. whole: those of the matrix."""
        return whole if self.rows is None else sum(span.size for span in self.rows)

    def rows_of(self, tensor: Tensor, dim: int = 0, per: int = 1) -> Tensor:
        """A view where it can be, so that no more of a file is read. per: rows that an element
        holds. Raises CannotCut."""
        return tensor if self.rows is None else _parts(tensor, self.rows, "rows", dim, per)

    def columns_of(self, tensor: Tensor, dim: int = 1, per: int = 1) -> Tensor:
        """As `rows_of`."""
        if self.columns is None:
            return tensor
        return _parts(tensor, (self.columns,), "columns", dim, per)

    def groups_of(self, table: Tensor, size: int) -> tuple[Tensor, int]:
        """Returns the part of a table (rows, groups) of `size` columns, and the size of its groups:
        smaller ones with the same numbers, where the part begins or ends in one."""
        if self.columns is None:
            return table, size
        step = gcd(size, self.columns.begin, self.columns.size)
        return table[:, torch.arange(self.columns.begin, self.columns.end, step) // size], step

    def blocks_of(self, table: Tensor, height: int) -> tuple[Tensor, int]:
        """As `groups_of`, of blocks of so many rows: (blocks, columns)."""
        if self.rows is None:
            return table, height
        starts, first = [], 0
        for span in self.rows:
            starts.append(first + span.begin)
            first += span.whole
        step = gcd(height, *starts, *(span.size for span in self.rows))
        indices = [
            torch.arange(start, start + span.size, step) // height
            for start, span in zip(starts, self.rows, strict=True)
        ]
        # Rows beyond the whole are zeros in any block.
        return table[torch.cat(indices).clamp(max=len(table) - 1)], step


def _parts(tensor: Tensor, spans: tuple[Span, ...], what: str, dim: int, per: int) -> Tensor:
    sizes = [-(-span.whole // per) for span in spans]
    if tensor.dim() <= dim or tensor.shape[dim] != sum(sizes):
        raise CannotCut(
            f"has the shape {tuple(tensor.shape)}, and config.json implies "
            f"{sum(span.whole for span in spans)} {what}"
        )
    cut = [
        _part(whole, span, what, dim, per)
        for whole, span in zip(torch.split(tensor, sizes, dim), spans, strict=True)
    ]
    return cut[0] if len(cut) == 1 else torch.cat(cut, dim)


def _part(tensor: Tensor, span: Span, what: str, dim: int, per: int) -> Tensor:
    if span.begin % per or span.size % per:
        raise CannotCut(
            f"holds {per} {what} in each integer, and a rank would have those from {span.begin} to "
            f"{span.end}; use another --tensor-parallel-size"
        )
    begin, end = span.begin // per, span.end // per
    found = max(0, min(end, tensor.shape[dim]) - begin)
    cut = tensor.narrow(dim, min(begin, tensor.shape[dim]), found)
    if found == end - begin:
        return cut
    missing = list(cut.shape)
    missing[dim] = end - begin - found
    return torch.cat((cut, cut.new_zeros(missing)), dim)
