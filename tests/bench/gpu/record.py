"""The folder that a run of the suite writes: rows as they come, one log, and what they come to.

`rows.jsonl` is the record itself: each line is flushed when it is known, so that a run which is cut
off keeps what it measured, and a later run can go on from it. The other files are made of it.
"""

import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.scheduler.errors import InvalidConfig
from tests.bench.gpu.goals import Row, table, verdicts, with_shares

# A longer log loses its end: what is copied off a machine that is lent is often limited.
_MAX_LOG_BYTES = 12 * 2**20


class Log:
    """A file for the logs of several processes at once, which stops at a size."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._left = _MAX_LOG_BYTES - (file.stat().st_size if file.exists() else 0)

    def write(self, text: bytes) -> None:
        with self._lock, self._file.open("ab") as file:
            file.write(text[: max(0, self._left)])
            self._left -= len(text)


class Record:
    """What is known so far, of this run and of those that it goes on from.

    An event is a row with the key `event`: `start`, `end`, `failure` (each `of` a part), `way`, and
    `run`, one for each command.
    """

    def __init__(self, folder: Path, earlier: Path | None = None) -> None:
        """earlier: the rows.jsonl of the run to go on from; it may be this folder's own.

        Raises InvalidConfig.
        """
        lines = [] if earlier is None else _read(earlier)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._lock = threading.Lock()
        self._rows: list[Row] = []
        self._file = folder / "rows.jsonl"
        self._file.write_text("", encoding="utf-8")
        self.log = Log(folder / "log.txt")
        for row in lines:
            self.note(row)

    def note(self, row: Row) -> None:
        """Any thread may call it."""
        with self._lock, self._file.open("a", encoding="utf-8") as file:
            self._rows.append(row)
            file.write(json.dumps(row) + "\n")

    def event(self, kind: str, **fields: object) -> None:
        self.note({"event": kind, **fields})

    def rows(self) -> list[Row]:
        """What was measured, with shares of what the device can do."""
        found = [row for row in self._rows if "event" not in row]
        device: Row = next((row for row in reversed(found) if row.get("part") == "device"), {})
        return [with_shares(row, device) for row in found]

    def events(self, kind: str) -> list[Row]:
        return [row for row in self._rows if row.get("event") == kind]

    def ended(self) -> dict[str, float]:
        """The seconds of each part that came to its end, well or not."""
        return {str(row["of"]): float(row["seconds"]) for row in self.events("end")}

    def failures(self) -> list[Row]:
        """Of the last run of each part."""
        found: list[Row] = []
        for row in self._rows:
            if row.get("event") == "start":
                found = [failure for failure in found if failure["of"] != row["of"]]
            elif row.get("event") == "failure":
                found.append(row)
        return found

    def write_summary(self) -> None:
        """summary.json and summary.txt: goals, failures, and the seconds of each part."""
        rows = self.rows()
        ways = self.events("way")
        summary: dict[str, Any] = {
            "runs": self.events("run"),
            "way": ways[-1] if ways else None,
            "seconds": self.ended(),
            "goals": [
                {
                    "what": v.goal.what,
                    "wanted": v.goal.wanted,
                    "wanted_here": v.here.wanted,
                    "measured": v.measured,
                    "is": v.word,
                }
                for v in verdicts(rows)
            ],
            "failures": self.failures(),
        }
        _replace(self.folder / "summary.json", json.dumps(summary, indent=1) + "\n")
        text = [details(rows), table(rows), failures_table(self.failures())]
        _replace(self.folder / "summary.txt", "\n\n".join(part for part in text if part) + "\n")


def _read(file: Path) -> list[Row]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(f"--resume: {file} cannot be read: {error.strerror}") from error
    rows = []
    for line in text.splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:  # the last one, of a run that was cut off
            continue
    return rows


def _replace(file: Path, text: str) -> None:
    """A run that is cut off leaves the old file or the new one."""
    new = file.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(file)


_SHOWN = (
    "rung", "kernel", "model", "layer", "rows", "batch", "context", "chunk", "before", "tokens",
    "mode", "us", "tpot_ms", "one_by_one_ms", "ttft_ms", "ready_s", "tokens_per_s", "of_copy",
    "of_matrix_rate", "host_ms", "waited_ms", "late_steps_ratio", "engine_idle_ratio",
    "direction", "blocks", "gb_per_s", "link_gb_per_s", "kernel_gb_per_s", "prefix", "computed_ms",
    "from_memory_ms", "from_pool_ms", "kernels_per_step", "rivals", "skipped", "tile",
    "ours_us", "torch_us", "num_cases", "worst", "file", "share", "states", "not_run",
)  # fmt: skip
_NOT_SHOWN = ("device", "load", "compile", "test", "linear tile")


def details(rows: Iterable[Row]) -> str:
    """A short line for each row with figures that one reads by eye."""
    lines = []
    for row in rows:
        figures = [
            f"{key} {row[key]:,.3g}" if isinstance(row[key], float) else f"{key} {row[key]}"
            for key in _SHOWN
            if row.get(key) is not None
        ]
        if row.get("part") not in _NOT_SHOWN and len(figures) > 1:
            lines.append(f"{row['part']}: {', '.join(figures)}")
    return "\n".join(lines)


def failures_table(failures: Iterable[Row]) -> str:
    """The first line of each message: the rest is in rows.jsonl."""
    lines = []
    for row in failures:
        name = f"{row['of']}, {row['what']}" if row["what"] else row["of"]
        lines.append(f"FAILED {name}: {str(row['message']).splitlines()[0]}")
    return "\n".join(lines)
