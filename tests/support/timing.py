"""Bounds for tests that compare times, on machines that do other work too."""

import threading
import time
from types import TracebackType

_NAP_S = 0.001


class Disturbance:
    """Measures how long the machine keeps a thread that is due from running.

    A test that compares times adds `tolerance_s` to its bounds: on a quiet machine they are near
    enough to see a fault, and on a busy one they widen by what it was seen to withhold.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Disturbance":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        self._thread.join()

    def tolerance_s(self, quiet_s: float) -> float:
        """quiet_s where nothing else ran; each step of what is measured may wait its turn else."""
        return quiet_s + 4 * self.longest_s

    def _watch(self) -> None:
        while not self._has_ended.is_set():
            began_s = time.perf_counter()
            time.sleep(_NAP_S)
            self.longest_s = max(self.longest_s, time.perf_counter() - began_s - _NAP_S)
