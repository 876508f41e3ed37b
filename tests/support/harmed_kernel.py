"""`python -m tests.support.harmed_kernel`: prints what `convergence.parted` finds in a kernel that
jump threading harms.

One thread does something more where a flag is not set, all return where it is not set, and all sum
up where it is. Threads have to meet before the second question. Jump threading has the one thread
skip that question, as it knows the answer: then it comes to the sum by itself.
"""

import json

import torch
import triton
import triton.language as tl

from tests.support.compile_kernels import META, Launch
from tests.support.convergence import parted

_THREAD = tl.constexpr("mov.u32 $0, %tid.x;")


@triton.jit
def _harmed(x, flag, out, SIZE: tl.constexpr):
    is_set = tl.load(flag)
    # In Triton's own code threads part where they compute by cases, as for a logarithm.
    thread = tl.inline_asm_elementwise(_THREAD, "=r,r", [is_set], tl.int32, True, 1)
    if thread == 0:  # noqa: SIM102
        if is_set == 0:
            tl.store(out, 1.0)
    if is_set == 0:
        return
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, SIZE))))


if __name__ == "__main__":
    numbers, flags = torch.empty(512, device=META), torch.empty(1, dtype=torch.int32, device=META)
    arguments = {"x": numbers, "flag": flags, "out": numbers, "SIZE": 512, "num_warps": 4}
    print(json.dumps(parted(Launch(_harmed, arguments).ptx(90))))
