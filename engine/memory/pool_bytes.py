"""`PoolBytes`: the bytes of a pool's blocks in the host's memory, each as one piece."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.memory.kv_pool import KVPools


class PoolBytes:
    """See `penstock.engine.memory.disk_tier.BlockMemory`.

    A piece has all layers of the keys, then of the values, then where there are scales those of
    both. Copies do not hold the interpreter's lock.
    """

    def __init__(self, pools: KVPools) -> None:
        self._pools = pools.groups
        self._views = [
            [_bytes_of(tensor) for pair in pool.pairs() for tensor in pair] for pool in pools.groups
        ]
        self._num_bytes = [sum(view[:, 0].size for view in views) for views in self._views]

    def num_bytes(self, group: int) -> int:
        return self._num_bytes[group]

    def read(self, group: int, block_id: int) -> memoryview:
        content = np.empty(self._num_bytes[group], np.uint8)
        for part, in_pool in self._parts(group, block_id, content):
            part[...] = in_pool
        return content.data

    def reach(self, group: int, block_id: int) -> None:
        self._pools[group].reach((block_id,))

    def write(self, group: int, block_id: int, content: memoryview) -> None:
        for part, in_pool in self._parts(group, block_id, np.frombuffer(content, np.uint8)):
            in_pool[...] = part

    def _parts(
        self, group: int, block_id: int, content: NDArray[np.uint8]
    ) -> "list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]":
        """Of a piece and of the pool, each (num_layers, bytes)."""
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
