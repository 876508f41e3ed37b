"""`Progress`: what the server is busy with before it serves and while it drains, shown as it goes.

On a terminal that is one line, drawn again and again, with a bar or a wheel and the seconds; in a
log file a line every few seconds. It knows no phase: the engine reports its own, and the service
names the others.
"""

import asyncio
import contextlib
import logging
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from penstock.engine.client import CLEAR_LINE, LoadProgress, LogFormat, is_terminal, say

logger = logging.getLogger("penstock")

# A terminal should be seen to move; a log file should stay short.
_DRAW_INTERVAL_S, _LOG_INTERVAL_S = 0.1, 5.0
# A line that is there for a moment only would flicker.
_SHORT_S = 0.3
_BAR_WIDTH = 20
_WHEEL = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class _Running:
    state: Callable[[], LoadProgress]
    began_s: float

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began_s


class Progress:
    """The phases that run now, and where they are shown. On one event loop."""

    def __init__(self, log_format: LogFormat) -> None:
        self._draws = log_format is LogFormat.TEXT and is_terminal(sys.stderr)
        self._running: dict[str, _Running] = {}
        self._engine_phase = ""

    @contextlib.contextmanager
    def phase(
        self, name: str, what: str, state: Callable[[], LoadProgress] | None = None
    ) -> Iterator[None]:
        """A phase of the server's own; the log says when it begins, and how long it took."""
        logger.info("%s: %s", name, what)
        self._running[name] = _Running(state or (lambda: LoadProgress(name)), time.monotonic())
        try:
            yield
        finally:
            elapsed_s = self._running.pop(name).elapsed_s
        logger.info("%s: %.2f s", name, elapsed_s)

    def on_engine(self, progress: LoadProgress) -> None:
        """The engine's phase, which it logs itself; it has one at a time."""
        if progress.phase != self._engine_phase:
            self.end_engine()
            self._engine_phase = progress.phase
        running = self._running.get(progress.phase)
        began_s = running.began_s if running else time.monotonic()
        self._running[progress.phase] = _Running(lambda: progress, began_s)

    def end_engine(self) -> None:
        self._running.pop(self._engine_phase, None)
        self._engine_phase = ""

    def text(self) -> str:
        """As "weights 3.1 of 15.2 GiB, 12 s"; empty where nothing is going on."""
        return "; ".join(_text(running) for running in self._running.values())

    @contextlib.asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Shows the phases that run in it."""
        showing = asyncio.create_task(self._draw() if self._draws else self._log())
        try:
            yield
        finally:
            showing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await showing

    async def _log(self) -> None:
        while True:
            await asyncio.sleep(_LOG_INTERVAL_S)
            if text := self.text():
                logger.info("%s", text)

    async def _draw(self) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        is_drawn = False
        try:
            while True:
                await asyncio.sleep(_DRAW_INTERVAL_S)
                line = self._line()
                if line or is_drawn:
                    say(CLEAR_LINE + line, sys.stderr, end="")
                is_drawn = bool(line)
        finally:
            if is_drawn:
                say(CLEAR_LINE, sys.stderr, end="")

    def _line(self) -> str:
        phases = [each for each in self._running.values() if each.elapsed_s >= _SHORT_S]
        line = "   ".join(map(_drawn, phases))
        return line[: shutil.get_terminal_size().columns - 1]  # a longer one could not be cleared


def _text(running: _Running) -> str:
    state = running.state()
    return f"{state.phase}{_count(state)}, {running.elapsed_s:.0f} s"


def _drawn(running: _Running) -> str:
    state, elapsed_s = running.state(), running.elapsed_s
    if state.total:
        filled = min(_BAR_WIDTH, _BAR_WIDTH * state.num_done // state.total)
        picture = "█" * filled + "·" * (_BAR_WIDTH - filled)
    else:
        picture = _WHEEL[int(elapsed_s / _DRAW_INTERVAL_S) % len(_WHEEL)]
    return f"{picture} {state.phase}{_count(state)}  {elapsed_s:.0f} s"


def _count(state: LoadProgress) -> str:
    if state.text:
        return f" {state.text}"
    if state.total is None:
        return ""
    if state.unit == "bytes":
        return f" {state.num_done / _GIB:.1f} of {state.total / _GIB:.1f} GiB"
    return f" {state.num_done} of {state.total} {state.unit}"
