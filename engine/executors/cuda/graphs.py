"""CUDA graphs: one call launches all kernels of a captured step."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

import torch

from penstock.engine.kernels.sizes import next_power_of_2
from penstock.engine.step.device_step import DraftSizes

# Of tokens, rows and their drafts together. With more a product is no longer bound by reading its
# weight, so that drafts cost their share of the time; with fewer, padding costs little.
_DRAFTED_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192)
# Of a row. The queries of a group of 4 heads are then two of the smallest tiles of matrix units.
_MOST_QUERIES = 8

Key = TypeVar("Key", bound=Hashable)
Output = TypeVar("Output")


def captured_sizes(max_size: int) -> list[int]:
    """Batch sizes to capture: a step is padded to the next one, so at most an eighth is wasted.

    1, 2, 4, 8, then multiples of 8 up to 256 and of 16 above.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_size + 16, 16)]
    return [size for size in sizes if size < max_size] + [max_size]


def drafted_sizes(max_size: int, num_drafts: int) -> DraftSizes:
    """Of steps of at most max_size rows, of which each may have so many drafts or more."""
    queries = min(_MOST_QUERIES, next_power_of_2(1 + num_drafts))
    most = min(_DRAFTED_SIZES[-1], max_size * queries)
    return DraftSizes((*(size for size in _DRAFTED_SIZES if size < most), most), queries)


class StepGraphs(Generic[Key, Output]):
    """Runs `run(key)` eagerly where there is no GPU, else as a graph that is captured at first use.

    The tensors that `run` reads and writes must not move. Those it returns are in the graphs'
    common memory pool, and are valid until the next graph runs.
    """

    def __init__(
        self,
        run: Callable[[Key], Output],
        device: torch.device,
        *,
        enabled: bool = True,
        beside: "StepGraphs[Any, Any] | None" = None,
    ) -> None:
        """beside: others that have the same memory pool."""
        self._run = run
        self._is_on = enabled and device.type == "cuda"
        self._graphs: dict[Key, tuple[torch.cuda.CUDAGraph, Output]] = {}
        self._pool: Any = None if beside is None else beside._pool
        if self._is_on and beside is None:
            self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, key: Key) -> Output:
        if not self._is_on:
            return self._run(key)
        if key not in self._graphs:
            return self._capture(key)
        graph, output = self._graphs[key]
        graph.replay()
        return output

    def capture(self, keys: Iterable[Key], on_captured: Callable[[], None]) -> None:
        """Captures them in this order, best the largest first: the rest reuse its memory. Calls
        back after each."""
        if not self._is_on:
            return
        for key in keys:
            self._capture(key)
            on_captured()

    def _capture(self, key: Key) -> Output:
        """Runs it once, which compiles its kernels, then captures it, which runs nothing."""
        computed = self._run(key)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._run(key)
        self._graphs[key] = graph, output
        return computed
