"""What of this machine the process may take: memory and cores, within its container's limits.

A container sees the whole machine in /proc. Its limits are in its control group, and whoever takes
more memory is killed, whoever takes more threads than cores waits. Both versions of control groups
are read, on the way from the process's own group to the root: the tightest limit holds.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def available_memory_bytes(root: Path = _ROOT) -> int:
    """What this process can take without swapping, by Linux's own estimate, or up to its limit."""
    free = [
        limit - _number(group / used) + _reclaimable(group / "memory.stat")
        for group, limit, used in _memory_limits(root)
    ]
    return max(0, min([_memory_info(root, "MemAvailable"), *free]))


def total_memory_bytes(root: Path = _ROOT) -> int:
    """The machine's, or as much of it as this process's limit lets it have."""
    limits = [limit for _, limit, _ in _memory_limits(root)]
    return min([_memory_info(root, "MemTotal"), *limits])


def num_cores(root: Path = _ROOT) -> int:
    """Cores that this process may run on at the same time, one at least."""
    shares = [quota / period for quota, period in _cpu_quotas(root) if quota > 0]
    return max(1, math.floor(min([len(os.sched_getaffinity(0)), *shares])))


def _memory_limits(root: Path) -> Iterator[tuple[Path, int, str]]:
    """(group, its limit in bytes, the name of the file with what it uses)."""
    for version, limit_name, used_name in (
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("", "memory.max", "memory.current"),
    ):
        for group in _groups(root, version):
            text = _text(group / limit_name)
            if text.isdigit():  # "max" is none; version 1 says none with a huge number
                yield group, int(text), used_name


def _cpu_quotas(root: Path) -> Iterator[tuple[int, int]]:
    """(time, of which period), in the same unit; -1 for no limit."""
    for group in _groups(root, "cpu"):
        if quota := _text(group / "cpu.cfs_quota_us"):
            yield int(quota), _number(group / "cpu.cfs_period_us")
    for group in _groups(root, ""):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdigit():
            yield int(quota), int(period)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The process's group and all above it. Version 2 has one tree, which no controller names."""
    top = root / "sys/fs/cgroup" / controller
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            # Inside a container the path may be the host's: then only the top is there, its own.
            group = top / path.lstrip("/")
            yield from (one for one in (group, *group.parents) if one.is_relative_to(top))


def _reclaimable(stat: Path) -> int:
    """Bytes of files read lately: counted as used, and given back at once when they are needed."""
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
    """Empty where there is no such file."""
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
