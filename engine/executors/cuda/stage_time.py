"""`StageTime`: how long one stage of a model computes a step, without what it waits for others."""

import time

import torch


class StageTime:
    """On a GPU by two events in its stream, else by the host, which computes then."""

    def __init__(self, device: torch.device) -> None:
        """The stage begins."""
        self._events: list[torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record()
        self._began_s = self._ended_s = time.perf_counter()

    def end(self) -> None:
        """It has launched all that it computes."""
        if self._events is not None:
            self._events[1].record()
        self._ended_s = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Once the device has passed the end."""
        if self._events is not None:
            return float(self._events[0].elapsed_time(self._events[1])) / 1000
        return self._ended_s - self._began_s
