"""`ModelFiles`: where a model is, the `Download` of what is not there yet, and how far that is.
`ListedModel`: a line of `penstock models`."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.process.phases import LoadProgress


@dataclass(frozen=True, slots=True)
class Download:
    """One that is to be done. what: for the log. state: how far it is, in any thread. run: does it;
    raises InvalidModel."""

    what: str
    state: Callable[[], LoadProgress]
    run: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model that passed the check, in a directory where all but its weights are; or a GGUF file,
    with all that it needs in it.

    download: of the weights, or the file; None where they are there.
    """

    directory: Path
    download: Download | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """name: what `penstock serve` takes. family None: its files do not say. problem: why it cannot
    be served, in a few words. model_impl: whose implementation computes it, as in `ModelInfo`; None
    where there is a problem."""

    name: str
    path: Path
    num_bytes: int
    family: str | None
    problem: str | None
    model_impl: str | None = None


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
