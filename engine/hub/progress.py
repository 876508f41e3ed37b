"""How far a download is: of all its files, whose threads count here. Knows nobody who shows it."""

import threading
import time

from penstock.engine.process.phases import LoadProgress

_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))  # those of the hub's pages


class DownloadStopped(Exception):
    """Raised in the threads that download once one of them has failed."""


class DownloadProgress:
    """How far one download is. Several threads may call it."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._lock = threading.Lock()
        self._done = 0
        self._fetched = 0  # of these, what an earlier download had not left
        self._is_stopped = False
        self._began_s = time.monotonic()

    def begin(self) -> None:
        """The rate counts from here."""
        self._began_s = time.monotonic()

    def add(self, num_bytes: int, *, is_new: bool = True) -> None:
        """Negative where bytes must be fetched again. is_new: False for what an earlier download
        left. Raises DownloadStopped."""
        with self._lock:
            if self._is_stopped:
                raise DownloadStopped
            self._done += num_bytes
            self._fetched += num_bytes * is_new

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True

    def state(self) -> LoadProgress:
        with self._lock:
            done, fetched = self._done, self._fetched
        rate = fetched / max(time.monotonic() - self._began_s, 1e-3)
        text = _part(done, self._num_bytes)
        if rate > 0:
            left_s = max(0, self._num_bytes - done) / rate
            text += f", {size(round(rate))}/s, {span(left_s)} left"
        return LoadProgress("download", done, self._num_bytes, text=text)


def size(num_bytes: int) -> str:
    """16.4 GB."""
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"


def span(seconds: float) -> str:
    """1 h 5 min, 2 min 30 s, 7 s."""
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest_s} s" if minutes else f"{rest_s} s"


def _part(num_bytes: int, total: int) -> str:
    """1.2 of 16.4 GB."""
    unit = next((unit for unit, _ in _UNITS if total >= unit), 1)
    return f"{num_bytes / unit:.{0 if unit == 1 else 1}f} of {size(total)}"
