"""`python -m tests.bench.engine all-reduce`: two ranks add their tensors, by our group and by gloo.

Each group has two processes with one thread each. They take turns, and the medians of each turn are
compared.
"""

import time
from statistics import median

import torch

from penstock.engine.ranks.group import Group
from tests.engine.ranks.members import members, outputs

KIB = 1024
_CALLS = 300
_SIZES = (4 * KIB, 32 * KIB, 512 * KIB, 4096 * KIB)


def measure(group: Group) -> list[float]:
    """Seconds of a call, for each size: the median. Runs in each rank."""
    torch.set_num_threads(1)
    made = []
    for num_bytes in _SIZES:
        tensor = torch.ones(num_bytes // 4)
        times = []
        for _ in range(_CALLS):
            began_s = time.perf_counter()
            group.all_reduce(tensor)
            times.append(time.perf_counter() - began_s)
            tensor.fill_(1.0)
        made.append(median(times[_CALLS // 10 :]))
    return made


def all_reduce(num_rounds: int) -> None:
    print("| two ranks, float32 | shared memory, us | gloo, us | ratio |\n|---|---:|---:|---:|")
    rounds = [(_turn("shm"), _turn("gloo")) for _ in range(num_rounds)]
    for index, num_bytes in enumerate(_SIZES):
        ours = [shared[index] for shared, _ in rounds]
        gloo = [other[index] for _, other in rounds]
        ratios = sorted(b / a for a, b in zip(ours, gloo, strict=True))
        print(
            f"| {num_bytes // KIB} KiB | {median(ours) * 1e6:.0f} | {median(gloo) * 1e6:.0f} | "
            f"{median(ratios):.1f} ({ratios[0]:.1f}-{ratios[-1]:.1f}) |"
        )


def _turn(backend: str) -> list[float]:
    with members(f"{__name__}:measure", 2, backend=backend) as processes:
        times: list[float] = outputs(processes)[0]
        return times
