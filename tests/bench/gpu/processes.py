"""Runs one process of the suite: its rows as they come, its log in a file, and an end in time.

A process that hangs in a GPU's driver ends at no signal until the driver lets it. It is signalled
and left behind, so that what comes after it is still measured.
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Row = dict[str, Any]

# For a process to end after SIGTERM, and after SIGKILL; and for its last rows to be read.
_TERM_S, _KILL_S, _READ_S = 3.0, 5.0, 5.0
_TAIL_BYTES = 1500
_POLL_S = 0.02


class Log(Protocol):
    """Bytes of several processes at once."""

    def write(self, text: bytes, /) -> object: ...


@dataclass(frozen=True, slots=True)
class Ended:
    """problem: why the process counts as failed, or None. The end of its log follows the first
    line. timed_out: it was stopped, which says nothing of what it would have found."""

    problem: str | None
    seconds: float
    timed_out: bool = False


class Process:
    """One process, which prints JSON objects: one on a line, each a row.

    log: gets its stderr.
    """

    def __init__(
        self,
        command: Sequence[str],
        note: Callable[[Row], None],
        log: Log,
        *,
        limit_s: float,
        stall_s: float | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """note: is called with each row from another thread, as it comes.

        stall_s: without a row for so long, its time is up.
        """
        self._started_s = self._last_row_s = time.monotonic()
        self._stall_s = stall_s
        self._ends_s = self._started_s + limit_s
        self._note = note
        self._tail = b""
        self._log = log
        # A group of its own, so that what it starts ends with it.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | (environment or {}),
            process_group=0,
        )
        _running.add(self)
        self._readers = [
            threading.Thread(target=read, daemon=True) for read in (self._read_rows, self._read_log)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def status(self) -> int | None:
        """Its exit status, when it has ended."""
        return self._process.returncode

    def wait(self) -> Ended:
        """Until it ends or its time is up. Never much longer, even if it cannot be ended."""
        reason, timed_out = "", False
        try:
            if not self._has_ended_by(self._ends_s):
                timed_out = True
                reason = f"stopped after {time.monotonic() - self._started_s:.0f} s"
                if time.monotonic() < self._ends_s:
                    reason += f", {self._stall_s:.0f} of them without a result"
        finally:
            left_behind = self.end()
        ends_s = time.monotonic() + _READ_S
        for reader in self._readers:
            reader.join(max(0.0, ends_s - time.monotonic()))
        seconds = time.monotonic() - self._started_s
        if left_behind:
            reason += "; it did not end when it was killed, and was left behind"
        status = self._process.returncode
        if not reason and not status:
            return Ended(None, seconds)
        tail = self._tail.decode(errors="replace").strip()
        last = tail.splitlines()[-1] if tail else "its log is empty"
        return Ended(f"{reason or _status(status)}: {last}\n{tail}", seconds, timed_out)

    def end(self) -> bool:
        """Ends it, and what it has started. True if it is still there."""
        if not self._signal(signal.SIGTERM, _TERM_S):
            self._signal(signal.SIGKILL, _KILL_S)
        else:  # what it has started may still run
            self._signal(signal.SIGKILL, 0.0)
        _running.discard(self)
        return self._process.poll() is None

    def _signal(self, number: signal.Signals, patience_s: float) -> bool:
        """Whether it ends within these seconds."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
        self._stall_s = None
        return self._has_ended_by(time.monotonic() + patience_s)

    def _has_ended_by(self, time_s: float) -> bool:
        while self._process.poll() is None:
            now_s = time.monotonic()
            if now_s > time_s or (self._stall_s and now_s > self._last_row_s + self._stall_s):
                return False
            time.sleep(_POLL_S)
        return True

    def _read_rows(self) -> None:
        assert self._process.stdout
        with self._process.stdout as lines:
            for line in lines:
                row = _row(line)
                if row is not None:
                    self._last_row_s = time.monotonic()
                    self._note(row)

    def _read_log(self) -> None:
        assert self._process.stderr
        with self._process.stderr as log:
            while text := os.read(log.fileno(), 65536):
                self._tail = (self._tail + text)[-_TAIL_BYTES:]
                self._log.write(text)


_running: set[Process] = set()


def end_all() -> None:
    """Ends the processes that are still running, for a suite that ends itself."""
    for process in tuple(_running):
        process.end()


def _row(line: bytes) -> Row | None:
    """None for what is no row, such as a line that a killed process did not finish."""
    if not line.startswith(b"{"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _status(status: int | None) -> str:
    if status is not None and status < 0:
        return f"it was ended by {signal.Signals(-status).name}"
    return f"it ended with {status}"
