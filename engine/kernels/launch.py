"""Kernels that start while the previous one still runs: programmatic dependent launch (PDL).

In a graph of kernels that depend on each other, each start costs about a microsecond in which the
device drains and fills again. On Hopper and data-centre Blackwell, a kernel launched with
`overlapped()` may use multiprocessors that the previous kernel leaves free, as soon as all programs
of that one have called `wait_for_kernels_before` or ended. There it may do work that needs no
earlier result.

**The rule.** Such a kernel calls `wait_for_kernels_before` in every program, before it reads or
writes any memory, including weights, and before any return. The wait ends when the previous kernel
has completed and its writes are visible; that kernel waited in the same way. So all earlier kernels
have completed, and memory can be reused as if kernels ran one after the other: by torch's
allocator, in place, or in tables that two kernels share. Only a prefetch may come before the wait,
because no program sees what it reads.

Other kernels need no rule. A kernel launched without the attribute, or a copy, waits for everything
before it; and our wait, after a kernel that never allows others to start, lasts until that one has
completed and its writes are visible. A captured graph keeps these dependencies in its edges; the
edge from a node that is not a kernel is an ordinary one.

PENSTOCK_PDL=0 in the environment turns PDL off, to rule it out when something is wrong.

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

# Compute capability 12 has it too, but capturing such a launch failed there: "invalid resource
# handle", https://github.com/sgl-project/sglang/pull/18596.
_CAPABILITIES = (9, 10)
_OVERLAPPED = {"PDL": True, "launch_pdl": True}
_ONE_BY_ONE = {"PDL": False}

_forced: bool | None = None


def overlapped() -> dict[str, bool]:
    """Launch arguments for a kernel that follows the rule; without PDL if the device has none."""
    enabled = device_overlaps() if _forced is None else _forced
    return _OVERLAPPED if enabled else _ONE_BY_ONE


def set_overlap(enabled: bool | None) -> None:
    """For all launches and captures of this process; None: where the device can."""
    global _forced
    _forced = enabled


@contextmanager
def overlap(enabled: bool) -> Iterator[None]:
    """Overrides the device and the environment for launches and captures in this context."""
    before = _forced
    set_overlap(enabled)
    try:
        yield
    finally:
        set_overlap(before)


@cache
def device_overlaps() -> bool:
    """Whether kernels may start early on it."""
    if os.environ.get("PENSTOCK_PDL") == "0":
        return False
    if knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] in _CAPABILITIES


@triton.jit
def wait_for_kernels_before(PDL: tl.constexpr):
    """Must be a kernel's first statement, see the rule. Lets the next kernel start, then waits.

    In this order: the next kernel takes no program's place, because all of ours run by then.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
