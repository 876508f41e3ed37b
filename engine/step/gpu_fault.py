"""What a GPU's failure is, after which the engine starts again in a slower way.

The ways are `penstock.engine.config.GpuWay`; the server's side of it is
`penstock.engine.ipc.client`.
"""

import signal

from penstock.engine.config import GpuWay
from penstock.scheduler.errors import PenstockError

# Ends a process whose GPU does not answer: no code of ours runs there.
HUNG = signal.SIGALRM
_SIGNS = ("CUDA error", "Triton Error [CUDA]")


class GpuWayFailed(PenstockError):
    """The GPU computes wrongly, or not at all, in this way."""

    def __init__(self, way: GpuWay, why: str) -> None:
        super().__init__(why)
        self.failed_way = way


def is_gpu_fault(error: BaseException) -> bool:
    """Whether the device or its driver reports it, of this process or of another rank's; then
    nothing more can be computed. Too little memory is none."""
    text = str(error)
    return any(sign in text for sign in _SIGNS) and "out of memory" not in text


def first_line(error: BaseException) -> str:
    """Names the error; further lines of a CUDA error are for the log alone."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
