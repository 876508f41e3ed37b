"""What Linux does for processes, and knows of them."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """From now on the kernel kills this process when the thread that started it ends, and nothing
    else does that is meant for the whole group, as a terminal's signals are: the server decides
    when the engine ends, because it may have requests to finish first."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)


def is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP, or a debugger, keeps the process from running."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[0] in "Tt"
    return False
