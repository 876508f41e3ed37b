"""How both processes write their logs: to stderr, as text or as JSON.

A record may carry fields beside its message: `logger.info("...", extra=fields(route=...))`. They
stay fields in JSON, and follow the message as name=value in text. The field request_id, or else
`configure`'s function, names the request that a line is about.

On a terminal the last line may be one that is drawn again and again, by the server. So a line of
text clears it first, whichever process writes it.

No writer ever waits: whoever reads the log may stop reading, a pipe holds 64 KiB, and a write to a
full one blocks. Then lines wait in `LineWriter`, and further ones are dropped and counted.
"""

import atexit
import contextlib
import logging
import os
import queue
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from typing import TextIO

import msgspec

from penstock.engine.config import LogFormat

CLEAR_LINE = "\r\x1b[K"
_FIELDS, _IN_MESSAGE = "penstock_fields", "penstock_in_message"  # attributes of a record
_ID = "request_id"
_STDERR = 2
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:/+@{}")

RequestId = Callable[[], str | None]


def is_terminal(stream: TextIO) -> bool:
    """Whether a line that is written there can be cleared and written again."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def configure(level: str, form: LogFormat, request_id: RequestId = lambda: None) -> None:
    """request_id: returns the id of the request being served where the line is written, or None."""
    begin = CLEAR_LINE if is_terminal(sys.stderr) else ""
    is_json = form is LogFormat.JSON
    formatter = JsonFormatter(request_id) if is_json else TextFormatter(request_id, begin)
    logging.basicConfig(level=level.upper(), handlers=[_Handler(formatter)])
    logging.captureWarnings(capture=True)


def fields(*, in_message: Collection[str] = (), **values: object) -> dict[str, object]:
    """For `extra` of a logging call. in_message: those that the message has already."""
    return {_FIELDS: values, _IN_MESSAGE: in_message}


def say(text: str, file: TextIO, end: str = "\n") -> None:
    """Prints for a person. If nobody reads it, that ends nothing and stops nothing."""
    writer_to(file.fileno()).write(f"{text}{end}")


def printable(text: str) -> str:
    """Without characters that would control a terminal or forge a line: those are escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


class TextFormatter(logging.Formatter):
    """Time, level, [request id], message, fields. Further lines of a message are indented."""

    def __init__(self, request_id: RequestId = lambda: None, begin: str = "") -> None:
        """begin: what clears the line where it is written."""
        super().__init__()
        self._request_id = request_id
        self._begin = begin

    def format(self, record: logging.LogRecord) -> str:
        values = dict(_fields_of(record))
        request_id = values.pop(_ID, None) or self._request_id()
        parts = [self.formatTime(record), record.levelname]
        parts += [f"[{_value(request_id)}]"] if request_id else []
        parts.append(record.getMessage())
        told = getattr(record, _IN_MESSAGE, ())
        parts += [
            f"{name}={_value(value)}"
            for name, value in values.items()
            if value is not None and value is not False and name not in told
        ]
        text = " ".join(parts)
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        return self._begin + "\n    ".join(map(printable, text.split("\n")))


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, and the record's fields; request_id and
    exception where there is one."""

    def __init__(self, request_id: RequestId = lambda: None) -> None:
        super().__init__()
        self._request_id = request_id

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        entry: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _printable_lines(record.getMessage()),
        }
        if request_id := self._request_id():
            entry[_ID] = request_id
        if record.exc_info:
            entry["exception"] = _printable_lines(self.formatException(record.exc_info))
        entry |= _fields_of(record)
        return msgspec.json.encode(entry).decode()


class _Handler(logging.Handler):
    """Formats where the line is logged, which knows the request; writes in another thread."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._writer = writer_to(_STDERR)
        self._writer.describe_dropped = self._dropped

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.write(f"{self.format(record)}\n")
        except Exception:
            self.handleError(record)

    def _dropped(self, num: int) -> str:
        text = "%d lines of the log were dropped, because nothing read it fast enough"
        record = logging.LogRecord("penstock", logging.WARNING, "", 0, text, (num,), None)
        return f"{self.format(record)}\n"


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    found: Mapping[str, object] = getattr(record, _FIELDS, {})
    return found


def _value(value: object) -> str:
    """As name=value shows it: in quotes where it could be read as something else."""
    if isinstance(value, str) and value and _PLAIN.issuperset(value):
        return value
    return msgspec.json.encode(value).decode()


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


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
