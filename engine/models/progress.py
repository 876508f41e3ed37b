"""How far a download is: a bar in a terminal, else a line of the log every few seconds."""

import logging
import sys
import threading
import time
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

logger = logging.getLogger(__name__)

# Seldom enough for a log that is kept, often enough to see that it goes on.
_INTERVAL_S = 5.0


class DownloadStopped(Exception):
    """Raised in the threads that download once one of them has failed."""


class DownloadProgress:
    """Of all files of one download. Several threads may call `add`."""

    def __init__(self, what: str, num_bytes: int, *, draws_bar: bool) -> None:
        self._what = what
        self._num_bytes = num_bytes
        self._draws_bar = draws_bar
        self._lock = threading.Lock()
        self._done = 0
        self._fetched = 0
        self._is_stopped = False
        self._bar: Any = None
        self._start_s = self._logged_s = time.monotonic()
        self._logged_bytes = 0

    def __enter__(self) -> Self:
        if self._draws_bar:
            self._bar = tqdm(
                total=self._num_bytes,
                desc=f"downloading {self._what}",
                unit="B",
                unit_scale=True,
                dynamic_ncols=True,
                file=sys.stderr,
            )
        self._start_s = self._logged_s = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if error is None:
            took_s = time.monotonic() - self._start_s
            logger.info("downloaded %s, %s in %s", self._what, size(self._fetched), span(took_s))

    def add(self, num_bytes: int, *, is_new: bool = True) -> None:
        """Negative where bytes must be fetched again. is_new: False for what an earlier download
        left. Raises DownloadStopped."""
        with self._lock:
            if self._is_stopped:
                raise DownloadStopped
            self._done += num_bytes
            self._fetched += num_bytes * is_new
            if self._bar is not None:
                if not is_new:  # it counts for the bar, not for the rate
                    self._bar.initial += num_bytes
                self._bar.update(num_bytes)
            elif time.monotonic() - self._logged_s >= _INTERVAL_S:
                self._log()

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True

    def _log(self) -> None:
        now_s = time.monotonic()
        rate = (self._fetched - self._logged_bytes) / (now_s - self._logged_s)
        left = span((self._num_bytes - self._done) / rate) if rate > 0 else "unknown"
        logger.info(
            "downloading %s: %s of %s, %s/s, time left: %s",
            self._what,
            size(self._done),
            size(self._num_bytes),
            size(max(0, round(rate))),
            left,
        )
        self._logged_s, self._logged_bytes = now_s, self._fetched


def size(num_bytes: int) -> str:
    """In the units of the hub's pages: 16.4 GB."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"


def span(seconds: float) -> str:
    """1 h 5 min, 2 min 30 s, 7 s."""
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest_s} s" if minutes else f"{rest_s} s"
