"""A container's limits, from files in the layout of both versions of control groups."""

import os
from pathlib import Path

import pytest

from penstock.engine.memory.machine import available_memory_bytes, num_cores, total_memory_bytes

_GB = 10**9
_MEMINFO = "MemTotal:       64000000 kB\nMemFree: 1 kB\nMemAvailable:   48000000 kB\n"
_ALL_CORES = len(os.sched_getaffinity(0))

V1 = {
    "proc/self/cgroup": "7:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n",
    # A container's own group is at the top, whatever its path is on the host.
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * _GB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * _GB}\n",
    "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {_GB}\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
}
V2 = {
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/memory.max": f"{8 * _GB}\n",
    "sys/fs/cgroup/memory.current": f"{3 * _GB}\n",
    "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {_GB}\n",
    "sys/fs/cgroup/cpu.max": "150000 100000\n",
}
UNLIMITED = {
    "proc/self/cgroup": "7:memory:/\n3:cpu,cpuacct:/\n0::/user.slice\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{16 * _GB}\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory.max": "max\n",
    "sys/fs/cgroup/cpu.max": "max 100000\n",
}
# The limit of a parent group counts too.
NESTED = V2 | {
    "proc/self/cgroup": "0::/kubepods/pod1\n",
    "sys/fs/cgroup/kubepods/pod1/memory.max": f"{4 * _GB}\n",
    "sys/fs/cgroup/kubepods/pod1/memory.current": f"{_GB}\n",
    "sys/fs/cgroup/kubepods/memory.max": "max\n",
}


def _machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": _MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")
    return root


@pytest.mark.parametrize("files", [V1, V2], ids=["v1", "v2"])
def test_a_containers_limits_are_used(files: dict[str, str], tmp_path: Path) -> None:
    root = _machine(tmp_path, files)
    assert total_memory_bytes(root) == 8 * _GB
    assert available_memory_bytes(root) == 6 * _GB
    assert num_cores(root) == 1


@pytest.mark.parametrize("files", [UNLIMITED, {}], ids=["unlimited", "no control groups"])
def test_without_limits_all_of_the_machine_is_usable(files: dict[str, str], tmp_path: Path) -> None:
    root = _machine(tmp_path, files)
    assert total_memory_bytes(root) == 64_000_000 * 1024
    assert available_memory_bytes(root) == 48_000_000 * 1024
    assert num_cores(root) == _ALL_CORES


def test_the_tightest_limit_of_all_parent_groups_is_used(tmp_path: Path) -> None:
    root = _machine(tmp_path, NESTED)
    assert total_memory_bytes(root) == 4 * _GB
    assert available_memory_bytes(root) == 3 * _GB


def test_a_process_over_its_limit_has_no_memory_available(tmp_path: Path) -> None:
    used = {"sys/fs/cgroup/memory.current": f"{20 * _GB}\n"}
    assert available_memory_bytes(_machine(tmp_path, V2 | used)) == 0


def test_a_share_of_a_core_is_one_thread(tmp_path: Path) -> None:
    assert num_cores(_machine(tmp_path, V2 | {"sys/fs/cgroup/cpu.max": "50000 100000"})) == 1
