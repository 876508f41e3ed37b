"""Kernels that start while the one before them still runs: programmatic dependent launch.

In a graph of kernels that depend on each other, each start costs about a microsecond in which the
device drains and fills again. On Hopper and the Blackwell of data centres, a kernel launched with
`overlapped()` may occupy what the one before leaves free, as soon as all programs of that one have
called `wait_for_kernels_before` or ended. It may do there what needs nobody's result.

**The rule.** Such a kernel calls `wait_for_kernels_before` in every program, before it reads or
writes memory, weights too, and before any way out. The wait ends when the kernel before it has
ended entirely and what it wrote can be seen; that one had waited likewise. So all that came before
has ended, however far back, and memory may be used again as if kernels ran one by one: by torch's
allocator, in place, or by tables that two kernels share. What may come before the wait is a
prefetch: it reads nothing that a program sees.

Whatever is not ours needs no rule. A kernel launched without the attribute, or a copy, waits for
everything before it; and our wait, behind a kernel that never says that others may start, lasts
until that one has ended and its writes are visible. A captured graph keeps all this in its edges,
and the edge from a node that is no kernel is an ordinary one.

PENSTOCK_PDL=0 in the environment turns it off, for the day it is suspected of something.

Sources: `griddepcontrol` in the PTX ISA; the CUDA programming guide, "Programmatic Dependent Launch
and Synchronization", and of CUDA graphs "Edge Data"; `cudaGraphEdgeData` in the runtime's manual.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton
import triton.language as tl
from triton import knobs

# Compute capability 12 has it too, but there a capture of such a launch was refused: "invalid
# resource handle", https://github.com/sgl-project/sglang/pull/18596.
_CAPABILITIES = (9, 10)
_OVERLAPPED = {"PDL": True, "launch_pdl": True}
_ONE_BY_ONE = {"PDL": False}

_forced: bool | None = None


def overlapped() -> dict[str, bool]:
    """Arguments for the launch of a kernel that keeps the rule; where it cannot be, it does not."""
    enabled = _device_overlaps() if _forced is None else _forced
    return _OVERLAPPED if enabled else _ONE_BY_ONE


@contextmanager
def overlap(enabled: bool) -> Iterator[None]:
    """For launches and captures meanwhile, whatever the device and the environment say."""
    global _forced
    before, _forced = _forced, enabled
    try:
        yield
    finally:
        _forced = before


@cache
def _device_overlaps() -> bool:
    if os.environ.get("PENSTOCK_PDL") == "0":
        return False
    if knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] in _CAPABILITIES


@triton.jit
def wait_for_kernels_before(PDL: tl.constexpr):
    """To be a kernel's first statement, see the rule. Lets the kernel behind it start, and waits.

    Others are let in first: they can take no program's place, because all of ours run by then.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
