"""`SmallSums`: all-reduce of a decode step's states by GPUs that read each other's memory.

One kernel of torch's symmetric memory, as vLLM and SGLang have it for small tensors, in the place
of NCCL's: each GPU copies its part into memory that all read, waits for the others, and adds all
parts in the order of the ranks, so that every rank has the same bits. torch keeps that order for
2, 4 and 8 ranks, and adds float32 and bfloat16.

It has not run on several GPUs yet, so it is off unless PENSTOCK_SYMMETRIC_SUMS=1 is in the
environment. Even then all ranks compare it with NCCL first, and keep to NCCL where one of them
cannot have it.

Sources: `one_shot_all_reduce_kernel`, `load_and_reduce` in torch's CUDASymmetricMemoryOps.cu.
"""

import logging
import os
from collections.abc import Callable
from itertools import permutations

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engine.ranks.group import Group

logger = logging.getLogger(__name__)

SYMMETRIC_SUMS = "PENSTOCK_SYMMETRIC_SUMS"
# Beyond, each GPU would read much more of the others than a ring sends.
MAX_BYTES = 256 * 1024
_SIZES, _DTYPES = (2, 4, 8), (torch.float32, torch.bfloat16)
_VECTOR_BYTES = 16  # that a thread reads at once


class SmallSums:
    def __init__(self, buffer: Tensor, group_name: str) -> None:
        """buffer: (MAX_BYTES,) uint8, which the ranks of this group read of each other."""
        self._buffer, self._group_name = buffer, group_name

    def takes(self, tensor: Tensor) -> bool:
        """Says the same on all ranks, whose tensors are alike."""
        num_bytes, start = tensor.nbytes, tensor.data_ptr()
        is_aligned = (num_bytes | start) % _VECTOR_BYTES == 0
        return is_aligned and 0 < num_bytes <= MAX_BYTES and tensor.dtype in _DTYPES

    def all_reduce(self, tensor: Tensor) -> None:
        """In place. A CUDA graph may hold it."""
        shared = self._buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(
            shared, tensor, "sum", self._group_name, tensor
        )

    def is_right(self, group: Group) -> bool:
        """Whether the sums are those of this group, and of the same bits on all ranks."""
        device, is_right = self._buffer.device, True
        generator = torch.Generator(device).manual_seed(group.rank)
        for dtype in _DTYPES:
            shape = (MAX_BYTES // dtype.itemsize,)
            # Sums of such numbers are exact in any order; those of others show the order.
            exact = torch.randint(-9, 9, shape, generator=generator, device=device).to(dtype)
            expected, others = exact.clone(), torch.randn(shape, generator=generator, device=device)
            others = others.to(dtype)
            group.all_reduce(expected)
            self.all_reduce(exact)
            self.all_reduce(others)
            of_first = others.clone()
            group.broadcast(of_first)
            is_right &= torch.equal(exact, expected) and torch.equal(others, of_first)
        return is_right


def small_sums(
    group: Group,
    process_group: dist.ProcessGroup | None,
    device: torch.device,
    num_gpus: int,
    agree: Callable[[bool], bool],
) -> SmallSums | None:
    """Those of a group that sums by NCCL. None where they are off, or some rank cannot have them.
    process_group: None for all ranks. num_gpus: of all ranks. agree: whether all ranks say so."""
    if os.environ.get(SYMMETRIC_SUMS) != "1":
        return None
    from torch.distributed import _symmetric_memory as symmetric_memory

    found, why = None, f"they are not for {group.size} ranks"
    if group.size in _SIZES:
        why = "a GPU does not reach the memory of another"
        pairs = permutations(range(num_gpus), 2)
        if agree(all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)):
            try:
                buffer = symmetric_memory.empty(MAX_BYTES, dtype=torch.uint8, device=device)
                ranks = process_group or dist.distributed_c10d._get_default_group()
                symmetric_memory.rendezvous(buffer, ranks)
                found = SmallSums(buffer, ranks.group_name)
            except RuntimeError as error:
                why = str(error).strip().partition("\n")[0]
            if not agree(found is not None):
                found = None
            elif found is not None and not agree(found.is_right(group)):
                found, why = None, "their sums are not NCCL's"
    if found is None:
        logger.warning("%s: sums stay with NCCL (%s)", SYMMETRIC_SUMS, why)
    return found
