"""A client that streams while another does what might delay it."""

import threading
import time
from typing import Any

import httpx

from tests.support.serving import MODEL, RunningServer


class streaming:  # noqa: N801  # reads as what it does
    """A stream that runs during the `with` block; returns its longest gap between two events."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._times_s: list[float] = []
        self._has_begun, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Any:
        self._thread.start()
        assert self._has_begun.wait(10)
        return lambda: max(b - a for a, b in zip(self._times_s, self._times_s[1:], strict=False))

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _read(self) -> None:
        body = {
            "model": MODEL,
            "prompt": "Once",
            "max_tokens": 1_900,
            "ignore_eos": True,
            "stream": True,
        }
        while not self._is_over.is_set():
            with httpx.stream(
                "POST", self._server.url + "/v1/completions", json=body, timeout=60
            ) as answer:
                for _ in answer.iter_raw():
                    self._times_s.append(time.monotonic())
                    self._has_begun.set()
                    if self._is_over.is_set():
                        return
