"""`PoolTensors`: the memory of a pool, of a processor or a device, or one that outlives the
process."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from penstock.engine.memory.host import zeros_on_touch
from penstock.engine.memory.pool.kv_memory import KVMemory, MappedPool

# (num_layers, num_blocks, ...), and the type of an element.
TensorShape = tuple[tuple[int, ...], torch.dtype]

_SPARE = 256


class PoolTensors:
    """The tensors of a pool, whose blocks have the same numbers in all of them."""

    def __init__(
        self,
        shapes: Sequence[TensorShape],
        device: torch.device,
        mapped: MappedPool | None = None,
    ) -> None:
        """mapped: where they are, for a pool that outlives the process; the content stays."""
        self.journal = mapped.journal if mapped else None
        """Lists the blocks, where they outlive this process."""
        self._pages = mapped.pages if mapped else None
        if mapped is None:
            self.tensors = [_zeros(*each, device) for each in shapes]
        else:
            self.tensors = [_from(*each) for each in zip(mapped.tensors, shapes, strict=True)]

    def reach(self, block_ids: Iterable[int]) -> None:
        """To be called before these blocks are used for the first time."""
        if self._pages is not None:
            self._pages.reach(max(block_ids, default=0))


def mapped_pools(
    memory: KVMemory | None, pools: Sequence[tuple[int, Sequence[TensorShape]]]
) -> Sequence[MappedPool | None]:
    """Returns where the tensors of each pool are; None each without such memory. pools: the blocks
    and the tensors of each."""
    if memory is None:
        return [None] * len(pools)
    return memory.map([(num, list(map(_block_bytes, tensors))) for num, tensors in pools])


def _block_bytes(tensor: TensorShape) -> tuple[int, int]:
    """Its layers, and the bytes of a block in one."""
    shape, dtype = tensor
    return shape[0], torch.Size(shape[2:]).numel() * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros would allocate the whole pool at once. Vectors are read that begin in the pool and
    # end behind it.
    count = torch.Size(shape).numel()
    return zeros_on_touch((count + _SPARE,), dtype)[:count].view(shape)


def _from(memory: memoryview, of: TensorShape) -> Tensor:
    shape, dtype = of
    # Not all types can be made of a buffer.
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes].view(dtype).view(shape)
