"""The memory of a process with all that it has started, by /proc."""

import contextlib
from pathlib import Path


def family(pid: int) -> list[int]:
    """The process, its children, theirs, and so on. Any of them may end while they are counted."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                with contextlib.suppress(OSError):
                    found += map(int, (task / "children").read_text().split())
    return found


def resident_bytes(pid: int) -> int:
    """Of the whole family. What a fork shares with its parent counts for both."""
    total = 0
    for each in family(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{each}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    total += int(line.split()[1]) << 10
    return total
