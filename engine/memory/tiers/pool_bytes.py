"""`PoolBytes`: the bytes of a pool's blocks in the host's memory, each as one piece."""

import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.memory.pool.kv_pool import KVPools


class StepsInFlight:
    """Counts the steps of several ranks, of which some begin a step while others are at the one
    before. Threads may share it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_completed = 0
        self.num_launched = 0
        """Changed by one thread alone."""

    def launch(self) -> None:
        """Every rank will compute one more step."""
        self.num_launched += 1

    def complete(self) -> None:
        """Every rank has computed the oldest one."""
        with self._changed:
            self._num_completed += 1
            self._changed.notify_all()

    def wait(self, num_launched: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_completed >= num_launched)


class PoolBytes:
    """See `penstock.engine.memory.tiers.disk_tier.BlockMemory`.

    A piece has all layers of the keys, then of the values, then where there are scales those of
    both; or of a recurrent state its matrices, and then the inputs of convolutions. Of several
    ranks it has their parts, one after the other. Copies do not hold the interpreter's lock.
    """

    def __init__(self, pools: Sequence[KVPools], steps: StepsInFlight | None = None) -> None:
        """pools: of every rank, of whose blocks those with the same number belong together.
        steps: those that must have been computed before a block is written to; None where none is
        in flight when a load begins."""
        self._pools = list(zip(*(each.all_groups for each in pools), strict=True))
        self._views = [
            [_bytes_of(tensor) for pool in group for pair in pool.pairs() for tensor in pair]
            for group in self._pools
        ]
        self._num_bytes = [sum(view[:, 0].size for view in views) for views in self._views]
        self._steps = steps or StepsInFlight()
        self._launched_before: dict[tuple[int, int], int] = {}  # each block was to be written

    def num_bytes(self, group: int) -> int:
        return self._num_bytes[group]

    def read(self, group: int, block_id: int) -> memoryview:
        content = np.empty(self._num_bytes[group], np.uint8)
        for part, in_pool in self._parts(group, block_id, content):
            part[...] = in_pool
        return content.data

    def reach(self, group: int, block_id: int) -> None:
        for pool in self._pools[group]:
            pool.reach((block_id,))
        self._launched_before[group, block_id] = self._steps.num_launched

    def write(self, group: int, block_id: int, content: memoryview) -> None:
        # A step that was launched for the block's last owner may not have come to every rank.
        self._steps.wait(self._launched_before.pop((group, block_id), 0))
        for part, in_pool in self._parts(group, block_id, np.frombuffer(content, np.uint8)):
            in_pool[...] = part

    def _parts(
        self, group: int, block_id: int, content: NDArray[np.uint8]
    ) -> "list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]":
        """Pairs of the same bytes, in a piece and in the pool, each (num_layers, bytes)."""
        parts, end = [], 0
        for view in self._views[group]:
            in_pool = view[:, block_id]
            start, end = end, end + in_pool.size
            parts.append((content[start:end].reshape(in_pool.shape), in_pool))
        return parts


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """(num_layers, num_blocks, bytes), of the same memory."""
    found: NDArray[np.uint8] = tensor.view(torch.uint8).flatten(2).numpy()
    return found
