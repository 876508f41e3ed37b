"""A progress bar on stderr: in place on a terminal, else a line now and then."""

import asyncio
import sys
import time
from collections.abc import Callable

WIDTH = 20
# A person wants to see it move; a log file wants to stay short.
TERMINAL_INTERVAL_S, LOG_INTERVAL_S = 0.2, 10.0


class Progress:
    """Shows how far a replay of `total` requests is. Stop it by cancelling `watch`."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._is_terminal = sys.stderr.isatty()

    async def watch(self, count: Callable[[], tuple[int, int]]) -> None:
        """`count` gives the requests that ended and the token events that came, so far."""
        start_s = time.monotonic()
        try:
            while True:
                await asyncio.sleep(TERMINAL_INTERVAL_S if self._is_terminal else LOG_INTERVAL_S)
                self._show(*count(), time.monotonic() - start_s)
        finally:
            if self._is_terminal:
                self._show(*count(), time.monotonic() - start_s)
                print(file=sys.stderr)

    def _show(self, done: int, num_tokens: int, elapsed_s: float) -> None:
        filled = WIDTH * done // self._total
        left = f"{elapsed_s / done * (self._total - done):.0f} s left" if done else "..."
        text = (
            f"{'█' * filled}{'·' * (WIDTH - filled)} {done}/{self._total}  "
            f"{done / elapsed_s:.1f} req/s  {num_tokens / elapsed_s:.0f} tok/s  {left}"
        )
        start, end = ("\r", "\x1b[K") if self._is_terminal else ("", "\n")
        print(start + text, end=end, file=sys.stderr, flush=True)
