"""The chunks of a step in tiles, as the kernels of recurrent layers read them, and the states that
are copied before and after a step.

The host knows the lengths of chunks and where their snapshots are due, so it makes the tiles; a
graph reads them from memory that is written before it runs.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.executors.cuda.device_tables import DeviceTables
from penstock.engine.kernels.blocks import copy_blocks, snapshot_states
from penstock.engine.memory.pool.state_pool import StatePool
from penstock.engine.models.parts.delta_net.kernels.chunks import TILE_TOKENS
from penstock.engine.step.device_step import StateTiles
from penstock.engine.step.executor import block_copies
from penstock.scheduler.types import ScheduledBatch

# Numbers in each row of the lists, and before them: two, and two for the rows' alignment.
_COLUMNS, _COUNTS = 4, 4
# A chunk has two: where its prompt parts from another's, and where it ends.
_MOST_SNAPSHOTS = 2


class _Lists(NamedTuple):
    chunks: list[tuple[int, int, int, int]]
    tiles: list[tuple[int, int, int, int]]


class StateTileMemory:
    """Owns the tiles that graphs read."""

    def __init__(self, tables: DeviceTables, sizes: Iterable[int], max_rows: int) -> None:
        """sizes: numbers of tokens; none where no layer has a recurrence. max_rows: of a step."""
        self._tables = tables
        self._max_rows = max_rows
        most = max((self._capacity(size) for size in sizes), default=0)
        self._memory = torch.zeros(
            _COUNTS + _COLUMNS * (max_rows + most) if most else 0,
            dtype=torch.int32,
            device=tables.lengths.device,
        )

    def write(self, batch: ScheduledBatch, query_starts: Sequence[int]) -> None:
        lists = _lists(batch, query_starts)
        values = _values(lists, self._max_rows)
        self._memory[: len(values)].copy_(self._tables.upload(values))

    def read(self, size: int) -> StateTiles:
        """Returns those of a step that is padded to `size` tokens, in memory that does not move."""
        return _split(self._memory, self._max_rows, self._capacity(size))

    def _capacity(self, size: int) -> int:
        """Tiles that so many tokens can be in."""
        ends = self._max_rows * (1 + _MOST_SNAPSHOTS)
        return min(size, -(-size // TILE_TOKENS) + ends)


def tiles_of(
    batch: ScheduledBatch, query_starts: Sequence[int], tables: DeviceTables
) -> StateTiles:
    """Makes those of a step that is launched kernel by kernel."""
    lists = _lists(batch, query_starts)
    num_chunks = len(lists.chunks)
    return _split(tables.upload(_values(lists, num_chunks)), num_chunks, len(lists.tiles))


class DeviceStates:
    """The pool of states and the table that says whose they are."""

    def __init__(self, pool: StatePool, tables: DeviceTables, group: int) -> None:
        """group: whose tables have the states of slots."""
        self._pool = pool
        self._tables = tables
        self._group = group

    def copy(self, batch: ScheduledBatch) -> None:
        """Copies the states that the step's sequences begin with.

        A state that is copied may be another sequence's own by the end of the list, never before:
        so in their order, as many at a time as do not depend on each other.
        """
        pairs: list[tuple[int, int]] = []
        for source, target in block_copies(batch.copies, self._group):
            if any(target in pair or source == pair[1] for pair in pairs):
                self._copy(pairs)
                pairs = []
            pairs.append((source, target))
        if pairs:
            self._copy(pairs)

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        copies = self._tables.upload(pairs)
        for tensor in (self._pool.matrices, self._pool.inputs):
            copy_blocks(copies, tensor)

    def snapshot_decodes(self, batch: ScheduledBatch) -> None:
        """After a step: those of its decodes. The kernels of chunks write their own."""
        pairs = [
            (batch.slots[row], state)
            for row, _, state in batch.snapshots
            if row < batch.num_decodes
        ]
        if pairs:
            table = self._tables.block_tables[self._group]
            snapshot_states(
                self._tables.upload(pairs), table, self._pool.matrices, self._pool.inputs
            )


def _lists(batch: ScheduledBatch, query_starts: Sequence[int]) -> _Lists:
    snapshots: dict[int, list[tuple[int, int]]] = {}
    for row, num_tokens, state in batch.snapshots:
        snapshots.setdefault(row, []).append((num_tokens, state))
    lists = _Lists([], [])
    for row in range(batch.num_decodes, len(batch.slots)):
        first, end, first_tile = query_starts[row], query_starts[row + 1], len(lists.tiles)
        own = snapshots.get(row, ())
        assert len(own) <= _MOST_SNAPSHOTS, own
        at = first
        for edge, state in (*((first + num, state) for num, state in own), (end, -1)):
            while at < edge:
                stop = min(at + TILE_TOKENS, edge)
                lists.tiles.append((at, stop, len(lists.chunks), state if stop == edge else -1))
                at = stop
        lists.chunks.append((row, first, first_tile, len(lists.tiles)))
    return lists


def _values(lists: _Lists, num_chunks: int) -> list[int]:
    """Returns the numbers that `_split` splits. num_chunks: that there is room for."""
    absent = num_chunks - len(lists.chunks)
    counts = len(lists.chunks), len(lists.tiles), 0, 0
    return [
        *counts,
        *chain.from_iterable(lists.chunks),
        *(0,) * (_COLUMNS * absent),
        *chain.from_iterable(lists.tiles),
    ]


def _split(values: Tensor, num_chunks: int, num_tiles: int) -> StateTiles:
    sizes = [_COUNTS, _COLUMNS * num_chunks, _COLUMNS * num_tiles]
    counts, chunks, tiles = torch.split(values[: sum(sizes)], sizes)
    return StateTiles(TILE_TOKENS, counts, chunks.view(-1, _COLUMNS), tiles.view(-1, _COLUMNS))
