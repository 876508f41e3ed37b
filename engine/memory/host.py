"""Host memory for tensors: copies to a GPU, and large buffers on huge pages that the system
allocates only when they are touched.

The processor reads all weights once a step, and with pages of 4 KiB the page-table walks cost a
fifth of the bandwidth.
"""

import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_CHUNK_BYTES = 64 * 2**20
_ALIGNMENT = 64  # a cache line, and the widest vector


def to_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """These numbers as a tensor of the same shape. On a GPU the copy is ordered by the stream, and
    the host does not wait for earlier steps, as it would for a copy of pageable memory."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy, to be read once the device has passed an event that is recorded after this."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def tensor_to_device(host: Tensor, device: torch.device) -> Tensor:
    """As `to_device`. Torch keeps pinned memory until its copy has run."""
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def zeros_on_touch(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written or read."""
    num_elements = torch.Size(shape).numel()
    if not num_elements:
        return torch.zeros(shape, dtype=dtype)
    num_bytes = num_elements * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=num_elements).view(shape)


class Arena:
    """Allocates tensors next to each other in large chunks, so that huge pages cover small ones. A
    chunk is freed with its last tensor. Several threads may allocate."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        taken = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if taken > len(self._free):
                self._free = zeros_on_touch((max(taken, _CHUNK_BYTES),), torch.uint8)
            memory, self._free = self._free[:num_bytes], self._free[taken:]
        return memory.view(dtype).view(shape)
