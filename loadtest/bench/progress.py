"""A progress bar on stderr: redrawn in place on a terminal, else a new line every 10 s."""

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

WIDTH = 20
# A terminal should be seen to move; a log file should stay short.
TERMINAL_INTERVAL_S, LOG_INTERVAL_S = 0.2, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayState:
    """How far a replay is. ttft_s: median of the latest responses; None before the first."""

    num_done: int
    num_failed: int
    num_tokens: int
    num_open: int
    ttft_s: float | None


class Progress:
    """Shows how far a replay of `total` requests is. Stop it by cancelling `watch`."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._is_terminal = sys.stderr.isatty()

    async def watch(self, state: Callable[[], ReplayState]) -> None:
        start_s = time.monotonic()
        try:
            while True:
                await asyncio.sleep(TERMINAL_INTERVAL_S if self._is_terminal else LOG_INTERVAL_S)
                self._show(state(), time.monotonic() - start_s)
        finally:
            if self._is_terminal:
                self._show(state(), time.monotonic() - start_s)
                print(file=sys.stderr)

    def _show(self, state: ReplayState, elapsed_s: float) -> None:
        start, end = ("\r", "\x1b[K") if self._is_terminal else ("", "\n")
        text = progress_line(state, self._total, elapsed_s)
        print(start + text, end=end, file=sys.stderr, flush=True)


def progress_line(state: ReplayState, total: int, elapsed_s: float) -> str:
    done = state.num_done
    filled = WIDTH * done // total
    parts = [
        f"{'█' * filled}{'·' * (WIDTH - filled)} {done}/{total}",
        f"{done / elapsed_s:.1f} req/s",
        f"{state.num_tokens / elapsed_s:.0f} tok/s",
        f"{state.num_open} in flight",
    ]
    if state.ttft_s is not None:
        parts.append(f"TTFT {state.ttft_s * 1000:.0f} ms")
    if state.num_failed:
        parts.append(f"{state.num_failed} failed")
    if done:
        parts.append(f"{elapsed_s / done * (total - done):.0f} s left")
    return "  ".join(parts)
