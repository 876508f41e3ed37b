"""How a device is timed, and how what it computes is compared."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], object]
# Launches of one graph: enough that its own launch does not count.
_LAUNCHES = 24
_BUDGET_S = 0.05
_MIN_REPEATS, _MAX_REPEATS = 3, 30
# How many times larger than the last-level cache the inputs of successive calls are together.
_TIMES_L2 = 4
_MAX_SETS = 48

_uses_graphs = True


def the_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16; in Triton's interpreter, whose bfloat16 products are wrong, float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def tolerance(dtype: torch.dtype) -> float:
    """Of `relative_error`. bfloat16 keeps 8 bits: a result rounded twice is off by some 3e-3."""
    return 1e-2 if dtype is torch.bfloat16 else 1e-5


def relative_error(out: Tensor, reference: Tensor) -> float:
    """By norms; NaN where `out` has one, which is below no tolerance."""
    reference = reference.double()
    return float((out.double() - reference).norm() / reference.norm())


def num_input_sets(num_bytes: int, device: torch.device) -> int:
    """How many inputs of this size to alternate, so that no call finds its own in the cache."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(_MAX_SETS, -(-_TIMES_L2 * cache // max(1, num_bytes))))


def time_without_graphs() -> None:
    """Where a GPU does not capture: `seconds_per_call` then launches the calls one by one, and the
    host's part counts where it is longer."""
    global _uses_graphs
    _uses_graphs = False


def seconds_per_call(calls: Sequence[Call], budget_s: float = _BUDGET_S) -> float:
    """The mean of these calls, one after the other: the median over replays of a CUDA graph.

    calls: the same work on inputs of their own. On the CPU they are run once, by the clock.
    budget_s: roughly, for what is timed.
    """
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)
    for call in calls:  # compiles
        call()
    torch.cuda.synchronize()
    once = _event_seconds(lambda: [call() for call in calls])
    rounds = max(1, min(_LAUNCHES // len(calls), int(budget_s / max(once, 1e-6))))

    def run_all() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    run = _captured(run_all) if _uses_graphs else run_all
    first = _event_seconds(run)
    repeats = max(_MIN_REPEATS, min(_MAX_REPEATS, int(budget_s / max(first, 1e-6))))
    times = [_event_seconds(run) for _ in range(repeats)]
    return statistics.median(times) / (rounds * len(calls))


def _captured(run: Call) -> Call:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def _event_seconds(run: Call) -> float:
    start, end = Mark(), Mark()
    start.set()
    run()
    end.set()
    return start.seconds_to(end)


class Mark:
    """A time on the device, or without one on the host's clock."""

    def __init__(self) -> None:
        self._event: Any = None
        self._time_s = 0.0
        if torch.cuda.is_available():
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def set(self) -> None:
        if self._event is not None:
            self._event.record()
        self._time_s = time.perf_counter()

    def has_come(self) -> bool:
        return self._event is None or bool(self._event.query())

    def seconds_to(self, later: "Mark") -> float:
        """Waits for the device until `later` has come."""
        if self._event is None:
            return later._time_s - self._time_s
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event)) / 1e3


def report(**measured: object) -> None:
    """One JSON line."""
    print(json.dumps(measured), flush=True)
