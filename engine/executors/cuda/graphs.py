"""CUDA graphs: one call launches all kernels of a captured step."""

import logging
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

import torch

logger = logging.getLogger(__name__)

_PROGRESS = 10  # graphs from one line in the log to the next: about a second

Key = TypeVar("Key", bound=Hashable)
Output = TypeVar("Output")


def captured_sizes(max_size: int) -> list[int]:
    """Batch sizes to capture: a step is padded to the next one, so at most an eighth is wasted.

    1, 2, 4, 8, then multiples of 8 up to 256 and of 16 above.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_size + 16, 16)]
    return [size for size in sizes if size < max_size] + [max_size]


class StepGraphs(Generic[Key, Output]):
    """Runs `run(key)` eagerly where there is no GPU, else as a graph that is captured at first use.

    The tensors that `run` reads and writes must not move. Those it returns are in the graphs'
    common memory pool, and are valid until the next graph runs.
    """

    def __init__(
        self, run: Callable[[Key], Output], device: torch.device, *, enabled: bool = True
    ) -> None:
        self._run = run
        self._is_on = enabled and device.type == "cuda"
        self._graphs: dict[Key, tuple[torch.cuda.CUDAGraph, Output]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._is_on else None

    def __call__(self, key: Key) -> Output:
        if not self._is_on:
            return self._run(key)
        if key not in self._graphs:
            return self._capture(key)
        graph, output = self._graphs[key]
        graph.replay()
        return output

    def capture(self, keys: Iterable[Key]) -> None:
        """Captures them in this order, best the largest first: the rest reuse its memory."""
        if not self._is_on:
            return
        ordered = list(keys)
        for number, key in enumerate(ordered, start=1):
            self._capture(key)
            if number % _PROGRESS == 0 or number == len(ordered):
                logger.info("%d of %d graphs captured", number, len(ordered))

    def _capture(self, key: Key) -> Output:
        """Runs it once, which compiles its kernels, then captures it, which runs nothing."""
        computed = self._run(key)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._run(key)
        self._graphs[key] = graph, output
        return computed
