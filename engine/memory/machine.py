"""The memory and cores that this process may use, within its container's limits.

A container sees the whole machine in /proc; its limits are in its control group. A process that
takes more memory is killed, and one with more threads than cores is throttled. Both versions of
control groups are read, from the process's own group up to the root: the tightest limit holds.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def available_memory_bytes(root: Path = _ROOT) -> int:
    """This process can allocate these without swapping, by Linux's own estimate and its limits."""
    free = [
        limit - _number(group / used) + _reclaimable(group / "memory.stat")
        for group, limit, used in _memory_limits(root)
    ]
    return max(0, min([_memory_info(root, "MemAvailable"), *free]))


def total_memory_bytes(root: Path = _ROOT) -> int:
    """The machine's, or the process's limit if that is lower."""
    limits = [limit for _, limit, _ in _memory_limits(root)]
    return min([_memory_info(root, "MemTotal"), *limits])


def num_cores(root: Path = _ROOT) -> int:
    """Cores that this process may use at the same time, at least one."""
    shares = [quota / period for quota, period in _cpu_quotas(root) if quota > 0]
    return max(1, math.floor(min([len(os.sched_getaffinity(0)), *shares])))


def _memory_limits(root: Path) -> Iterator[tuple[Path, int, str]]:
    """(group, its limit in bytes, the name of the file with its usage)."""
    for version, limit_name, used_name in (
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("", "memory.max", "memory.current"),
    ):
        for group in _groups(root, version):
            text = _text(group / limit_name)
            if text.isdigit():  # "max" is no limit; in version 1 a huge number is
                yield group, int(text), used_name


def _cpu_quotas(root: Path) -> Iterator[tuple[int, int]]:
    """(quota, period), in the same unit; a quota of -1 is no limit."""
    for group in _groups(root, "cpu"):
        if quota := _text(group / "cpu.cfs_quota_us"):
            yield int(quota), _number(group / "cpu.cfs_period_us")
    for group in _groups(root, ""):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdigit():
            yield int(quota), int(period)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The process's group and all above it. Version 2 has one tree, without a controller's name."""
    top = root / "sys/fs/cgroup" / controller
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            # Inside a container the path may be the host's: then only the top exists, its own.
            group = top / path.lstrip("/")
            yield from (one for one in (group, *group.parents) if one.is_relative_to(top))


def _reclaimable(stat: Path) -> int:
    """The page cache: counted as used, and freed when memory is needed."""
    fields = dict(line.split() for line in _text(stat).splitlines())
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def _memory_info(root: Path, field: str) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/meminfo has no {field}")


def _number(file: Path) -> int:
    return int(_text(file) or 0)


def _text(file: Path) -> str:
    """Empty if there is no such file."""
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
