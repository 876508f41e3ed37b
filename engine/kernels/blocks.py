"""Copies whole blocks of the KV pool, for a sequence that continues another's partial block."""

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.sizes import ceil_div

_BLOCK = 2048


def copy_blocks(copies: Tensor, keys: Tensor, values: Tensor) -> None:
    """Copies block source to block target in every layer, for each pair of copies, (N, 2) int32.

    keys, values: (layers, blocks, ...), or their scales. No target may be a source.
    """
    size = keys[0, 0].numel()
    grid = (len(copies), len(keys), ceil_div(size, _BLOCK))
    _copy_blocks[grid](copies, keys, values, keys.shape[1], size, BLOCK=_BLOCK, num_warps=8)


@triton.jit(do_not_specialize=["num_blocks"])
def _copy_blocks(copies, keys, values, num_blocks, size, BLOCK: tl.constexpr):
    copy = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64) * num_blocks * size
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source = layer + tl.load(copies + 2 * copy).to(tl.int64) * size + column
    target = layer + tl.load(copies + 2 * copy + 1).to(tl.int64) * size + column
    mask = column < size
    tl.store(keys + target, tl.load(keys + source, mask=mask), mask=mask)
    tl.store(values + target, tl.load(values + source, mask=mask), mask=mask)
