"""Which tokens of a step have which LoRA adapter, as the GPU's kernels read it.

The host knows the adapter of each sequence, so it makes the tiles; a graph reads them from memory
that is written before it runs.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from penstock.engine.executors.cuda.device_tables import DeviceTables
from penstock.engine.kernels.adapters import most_tiles, tile_rows
from penstock.engine.step.device_step import AdapterTiles
from penstock.engine.step.model_input import AdapterRun


class TileMemory:
    """Owns the tiles that graphs read."""

    def __init__(self, tables: DeviceTables, sizes: Iterable[int], num_slots: int) -> None:
        """sizes: numbers of tokens. num_slots: 0 where there are no adapters."""
        self._tables = tables
        self._num_slots = num_slots
        self._memory = torch.zeros(
            max((size + 3 * most_tiles(size, num_slots) for size in sizes), default=0)
            if num_slots
            else 0,
            dtype=torch.int32,
            device=tables.lengths.device,
        )

    def write(self, runs: Sequence[AdapterRun], size: int) -> None:
        """Writes those of a step that is padded to `size` tokens."""
        values = _values(runs, size, most_tiles(size, self._num_slots))
        self._memory[: len(values)].copy_(self._tables.upload(values))

    def read(self, size: int) -> AdapterTiles:
        """In memory that does not move."""
        return _split(self._memory, size, most_tiles(size, self._num_slots))


def tiles_of(
    runs: Sequence[AdapterRun], num_tokens: int, num_slots: int, tables: DeviceTables
) -> AdapterTiles | None:
    """Makes those of a step that is launched kernel by kernel; None where it has no adapters."""
    if not runs:
        return None
    num_tiles = most_tiles(num_tokens, num_slots)
    return _split(tables.upload(_values(runs, num_tokens, num_tiles)), num_tokens, num_tiles)


def _values(runs: Sequence[AdapterRun], num_tokens: int, num_tiles: int) -> list[int]:
    """Returns the numbers that `_split` splits."""
    by_slot: dict[int, list[range]] = {}
    for run in runs:
        tokens = range(run.first_token, run.first_token + run.num_tokens)
        by_slot.setdefault(run.weights, []).append(tokens)
    rows = tile_rows(num_tokens)
    order: list[int] = []
    tiles: list[tuple[int, int, int]] = []
    for slot, ranges in by_slot.items():
        first = len(order)
        for tokens in ranges:
            order.extend(tokens)
        tiles += [(slot, at, min(rows, len(order) - at)) for at in range(first, len(order), rows)]
    assert len(tiles) <= num_tiles, (len(tiles), num_tiles)
    order += [0] * (num_tokens - len(order))
    tiles += [(0, 0, 0)] * (num_tiles - len(tiles))
    slots, firsts, counts = zip(*tiles, strict=True)
    return [*order, *slots, *firsts, *counts]


def _split(values: Tensor, num_tokens: int, num_tiles: int) -> AdapterTiles:
    sizes = [num_tokens, num_tiles, num_tiles, num_tiles]
    order, slots, firsts, counts = torch.split(values[: sum(sizes)], sizes)
    return AdapterTiles(order, slots, firsts, counts, tile_rows(num_tokens))
