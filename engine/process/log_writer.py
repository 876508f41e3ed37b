"""`LineWriter`: lines to a file descriptor from a thread of its own, so that no writer ever waits.

Whoever reads the log may stop reading: a pipe holds 64 KiB, and a write to a full one blocks. Then
lines wait here, and further ones are dropped and counted. It knows nothing of levels and formats.
"""

import atexit
import contextlib
import os
import queue
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import cache

_MAX_WAITING = 4096
_MAX_AT_ONCE = 64
_GATHER_S = 0.01
# How long the end of the process may wait for what is not written yet.
_LAST_LINES_S = 1.0
_writers: "weakref.WeakSet[LineWriter]" = weakref.WeakSet()


class LineWriter:
    """The lines of one descriptor, in order."""

    def __init__(self, descriptor: int, max_waiting: int = _MAX_WAITING) -> None:
        self._descriptor = descriptor
        self._waiting: queue.Queue[str] = queue.Queue(max_waiting)
        self._num_dropped = 0
        self.describe_dropped: Callable[[int], str] = "{} lines were dropped\n".format
        """Makes the line that says how many were dropped."""
        threading.Thread(target=self._run, name="log", daemon=True).start()
        _writers.add(self)

    def write(self, text: str) -> None:
        """Never waits. text: whole lines, or one to be drawn again."""
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            self._num_dropped += 1

    def flush(self, timeout_s: float) -> None:
        """Waits until what was given so far is written, for at most this long."""
        with self._waiting.all_tasks_done:
            self._waiting.all_tasks_done.wait_for(
                lambda: not self._waiting.unfinished_tasks, timeout_s
            )

    def _run(self) -> None:
        while True:
            lines = [self._waiting.get()]
            # Under load many lines share one turn of this thread, which would otherwise compete
            # with the one that serves for every line.
            time.sleep(_GATHER_S)
            with contextlib.suppress(queue.Empty):
                while len(lines) < _MAX_AT_ONCE:
                    lines.append(self._waiting.get_nowait())
            for group in _grouped(lines):
                self._write(group)
            if self._num_dropped and self._waiting.empty():
                num_dropped, self._num_dropped = self._num_dropped, 0
                self._write(self.describe_dropped(num_dropped))
            for _ in lines:
                self._waiting.task_done()

    def _write(self, text: str) -> None:
        # Without Python's buffer, whose lock would be held by a thread that waits for its reader.
        data = text.encode(errors="backslashreplace")
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            pass  # nobody reads it any more, or the disk is full: that ends nothing


def _grouped(lines: list[str]) -> Iterator[str]:
    """Joined as far as a pipe takes them in one piece, between the lines of another process."""
    group = ""
    for line in lines:
        if group and len((group + line).encode(errors="backslashreplace")) > select.PIPE_BUF:
            yield group
            group = ""
        group += line
    yield group


@cache
def writer_to(descriptor: int) -> LineWriter:
    return LineWriter(descriptor)


@atexit.register
def flush_all() -> None:
    """Before the process ends; `os._exit` does not call it."""
    for writer in list(_writers):
        writer.flush(_LAST_LINES_S)
