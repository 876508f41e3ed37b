"""`AdapterSlots`: the LoRA adapters on a GPU, in memory that captured graphs know.

All of it is allocated at start, for as many adapters of as high a rank as the settings allow.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.engine.errors import AdapterRefused
from penstock.engine.kernels.adapters import BAND, LowRanks, add_low_rank
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.lora.weights import projections
from penstock.engine.models.parts.adapter import Adapter, Projection
from penstock.engine.models.parts.tensors import Stack
from penstock.engine.step.device_step import AdapterTiles


class AdapterSlots:
    """One thread puts adapters into slots, another one computes steps and frees slots.

    Each layer's tensors are `LowRanks`; the ranks and scales of all layers are rows of one table,
    with a column for each slot.
    """

    def __init__(
        self,
        model: ModelConfig,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self._device = device
        self._free = deque(range(num_slots))
        of_layers = [projections(model, layer).values() for layer in range(model.num_layers)]
        shape = sum(map(len, of_layers)), num_slots
        self._ranks = torch.zeros(shape, dtype=torch.int32, device=device)
        self._scales = torch.zeros(shape, dtype=torch.float32, device=device)
        self._stacks: list[dict[Stack, _Stack]] = []
        row = 0
        for changed in of_layers:
            stacks: dict[Stack, _Stack] = {}
            for stack in Stack:
                stacked = [each for each in changed if each.stack is stack]
                if not stacked:
                    continue
                end = row + len(stacked)
                tables = self._ranks[row:end], self._scales[row:end]
                stacks[stack] = _Stack(stacked, row, max_rank, dtype, *tables)
                row = end
            self._stacks.append(stacks)

    @property
    def num_bytes(self) -> int:
        tables = self._ranks.nbytes + self._scales.nbytes
        return tables + sum(each.num_bytes for layer in self._stacks for each in layer.values())

    def add(self, layer: int, stack: Stack, x: Tensor, out: Tensor, tiles: AdapterTiles) -> None:
        """Adds to `out`, what a linear layer has made of x, what the adapters of its tokens add."""
        if (found := self._stacks[layer].get(stack)) is not None:
            add_low_rank(x, found.changes, tiles, out)

    def put(self, adapter: Adapter) -> int:
        """The slot that it is in now. adapter: in the host's memory, and in the slots' type. Waits
        for the copies, which hold up no step. Raises AdapterRefused where no slot is free."""
        try:
            slot = self._free.popleft()
        except IndexError:
            raise AdapterRefused(
                f"all {self.num_slots} slots for adapters are taken, by those that are loaded and "
                "by those that were unloaded while requests still run with them; try again when "
                "these have ended, or start the server with a higher --max-loras"
            ) from None
        try:
            with self._own_stream():
                self._write(slot, adapter)
        except BaseException:
            self._free.append(slot)
            raise
        return slot

    def free(self, slot: int) -> None:
        """No step that is launched from now on has tokens of its adapter."""
        self._free.append(slot)

    def _write(self, slot: int, adapter: Adapter) -> None:
        ranks, scales = [0] * len(self._ranks), [0.0] * len(self._ranks)
        for stacks, layer in zip(self._stacks, adapter.layers, strict=True):
            for stack, changes in layer.items():
                for change in changes:
                    own = stacks[stack]
                    index = own.indices[change.projection.start]
                    ranks[own.first_row + index] = change.rank
                    scales[own.first_row + index] = change.scale
                    own.down(slot, index)[: change.rank] = change.down
                    up = own.changes.up[slot, : change.rank]
                    up[:, change.projection.start : change.projection.end] = change.up.t()
        self._ranks[:, slot] = torch.tensor(ranks, dtype=torch.int32)
        self._scales[:, slot] = torch.tensor(scales)

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Ordered after the steps that were launched before, which may read what a slot had; the
        host waits for its end, so that steps which are launched later read what it wrote."""
        if self._device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


class _Stack:
    """Serves one linear layer. first_row: its first in the tables of all layers."""

    def __init__(
        self,
        stacked: list[Projection],
        first_row: int,
        max_rank: int,
        dtype: torch.dtype,
        ranks: Tensor,
        scales: Tensor,
    ) -> None:
        (columns,) = {each.in_features for each in stacked}
        num_slots, device = ranks.shape[1], ranks.device
        self.first_row = first_row
        self.indices: Mapping[int, int] = {each.start: i for i, each in enumerate(stacked)}
        self._max_rank = max_rank
        bands = [
            (index, first, min(first + BAND, each.end))
            for index, each in enumerate(stacked)
            for first in range(each.start, each.end, BAND)
        ]

        def empty(rows: int, columns: int) -> Tensor:
            return torch.empty(num_slots, rows, columns, dtype=dtype, device=device)

        self.changes = LowRanks(
            down=empty(len(stacked) * max_rank, columns),
            up=empty(max_rank, stacked[-1].end),
            ranks=ranks,
            scales=scales,
            bands=torch.tensor(bands, dtype=torch.int32).to(device),
            alignment=math.gcd(16, *(first for _, first, _ in bands)),
        )

    @property
    def num_bytes(self) -> int:
        return self.changes.down.nbytes + self.changes.up.nbytes + self.changes.bands.nbytes

    def down(self, slot: int, index: int) -> Tensor:
        """A of one projection: (max_rank, columns)."""
        return self.changes.down[slot, index * self._max_rank : (index + 1) * self._max_rank]
