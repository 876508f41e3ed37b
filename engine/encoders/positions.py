"""The positions of a sequence with inserts: what its tokens are rotated by, and attend to."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from penstock.scheduler.types import Insert


def insert_positions(inserts: Sequence[Insert], start: int, end: int) -> Tensor:
    """What the tokens [start, end) are rotated by: (3, end - start) int64: frame, row, column.

    inserts: of the sequence, ascending. The tokens of one have the positions of its grid, and the
    text after it goes on after the largest of row and column.
    Source: get_rope_index of transformers' Qwen3VLModel and Qwen3_5Model.
    """
    positions = torch.arange(start, end).repeat(3, 1)
    shift = 0
    for insert in inserts:
        first, num_tokens, grid = insert.start, insert.num_tokens, insert.grid
        assert prod(grid) == num_tokens, insert
        if first >= end:
            break
        if first + num_tokens > start:
            inside = torch.arange(max(first, start), min(first + num_tokens, end))
            places = torch.stack(torch.unravel_index(inside - first, grid))
            positions[:, inside - start] = first - shift + places
        shorter = num_tokens - max(grid[1:])
        positions[:, max(first + num_tokens - start, 0) :] -= shorter
        shift += shorter
    return positions


def reaches(inserts: Sequence[Insert], start: int, end: int) -> Tensor | None:
    """The position after the last that each of the tokens [start, end) attends to: (end - start,)
    int64; None where it is its own, as no insert among them is whole."""
    found = None
    for insert in inserts:
        stop = insert.start + insert.num_tokens
        if insert.is_whole and insert.start < end and stop > start:
            assert start <= insert.start and stop <= end, "it is computed in one chunk"
            found = torch.arange(start + 1, end + 1) if found is None else found
            found[insert.start - start : stop - start] = stop
    return found
