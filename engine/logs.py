"""How both processes write their logs: to stderr, as text or as JSON.

On a terminal the last line may be one that is drawn again and again, by the server. So a line of
text clears it first, whichever process writes it.
"""

import logging
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TextIO

import msgspec

from penstock.engine.config import LogFormat

CLEAR_LINE = "\r\x1b[K"
_TEXT = "%(asctime)s %(levelname)s %(message)s"


def is_terminal(stream: TextIO) -> bool:
    """Whether a line that is written there can be cleared and written again."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def configure(
    level: str, form: LogFormat, request_id: Callable[[], str | None] = lambda: None
) -> None:
    """request_id: returns the id of the request being served where the line is written, or None."""
    handler = logging.StreamHandler()
    is_json = form is LogFormat.JSON
    text = CLEAR_LINE + _TEXT if is_terminal(sys.stderr) else _TEXT
    handler.setFormatter(JsonFormatter(request_id) if is_json else logging.Formatter(text))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(capture=is_json)  # else they would be lines of plain text


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message; request_id and exception where there is
    one."""

    def __init__(self, request_id: Callable[[], str | None] = lambda: None) -> None:
        super().__init__()
        self._request_id = request_id

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        entry = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := self._request_id():
            entry["request_id"] = request_id
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()
