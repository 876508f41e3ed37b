"""Packs LoRA adapters: see `AdapterLayer` of structs.h, and low_rank.h."""

import ctypes
from collections.abc import Sequence
from ctypes import Structure

from torch import Tensor
from torch.nn import functional

from penstock.engine.memory.host import Arena
from penstock.engine.models.parts.adapter import Adapter, Change
from penstock.engine.models.parts.tensors import Stack
from penstock.engine.native.packing import BAND
from penstock.engine.native.structures import structure
from penstock.engine.step.model_input import AdapterRun

# low_rank.h packs so many of A's rows, and of their columns.
_ROWS, _COLUMNS = 4, 16
# structs.h has so many projections of each stack, in this order.
_PROJECTIONS = {Stack.QKV: 3, Stack.GATES: 2, Stack.OUTPUT: 1, Stack.GATE_UP: 2, Stack.DOWN: 1}

_LOW_RANK, _LAYER, _RUN = map(structure, ("LowRank", "AdapterLayer", "AdapterRun"))


class NativeAdapter:
    """Owns what its pointers point into. width: the most that the ranks of a stack add up to."""

    def __init__(self, adapter: Adapter, rows: Sequence[dict[Stack, list[int]]]) -> None:
        """rows: of each layer, those of the linear layers that a stack is made of, where there are
        several, and of all of them, where there is one."""
        self._arena = Arena()
        self._owned: list[Tensor] = []
        self.width = 0
        self.layers = (_LAYER * len(adapter.layers))()
        for layer, changes, rows_of in zip(self.layers, adapter.layers, rows, strict=True):
            place = width = 0
            for stack, most in _PROJECTIONS.items():
                low_ranks = [
                    part
                    for change in changes.get(stack, ())
                    for part in self._parts(change, rows_of[stack])
                ]
                assert len(low_ranks) <= most, (stack, len(low_ranks))
                for index, low_rank in enumerate(low_ranks):
                    layer.changes[place + index] = low_rank
                # Gates are of one stack with what is before them.
                width *= stack is Stack.GATES
                width += sum(part.rank for part in low_ranks)
                self.width = max(self.width, width)
                place += most

    def _parts(self, change: Change, rows: list[int]) -> list[Structure]:
        """Returns those of each linear layer that has some of its rows."""
        parts = []
        first_row = 0
        for index, num_rows in enumerate(rows):
            start = max(change.projection.start, first_row)
            end = min(change.projection.end, first_row + num_rows)
            if start < end:
                up = change.up[start - change.projection.start : end - change.projection.start]
                parts.append(self._low_rank(change, up, index, start - first_row))
            first_row += num_rows
        return parts

    def _low_rank(self, change: Change, up: Tensor, linear: int, start: int) -> Structure:
        """start: the first row of the linear layer that it changes."""
        rank, columns = change.down.shape
        padded = functional.pad(change.down, (0, -columns % _COLUMNS, 0, -rank % _ROWS))
        packs = padded.view(len(padded) // _ROWS, _ROWS, -1, _COLUMNS).transpose(1, 2)
        lead = start % BAND
        padded = functional.pad(up, (0, 0, lead, -(lead + len(up)) % BAND))
        bands = padded.view(-1, BAND, rank).transpose(1, 2)
        down = self._arena.empty(packs.shape, packs.dtype).copy_(packs)
        bands = self._arena.empty(bands.shape, bands.dtype).copy_(bands)
        self._owned += [down, bands]
        return _LOW_RANK(
            down=down.data_ptr(),
            up=bands.data_ptr(),
            rank=change.rank,
            linear=linear,
            first=start // BAND,
            bands=len(bands),
            scale=change.scale,
        )


def native_runs(runs: Sequence[AdapterRun]) -> "ctypes.Array[Structure]":
    packed = (
        _RUN(each.first_token, each.num_tokens, ctypes.addressof(each.weights.layers))
        for each in runs
    )
    return (_RUN * len(runs))(*packed)
