"""`penstock top`: a Penstock server's metrics, live in a terminal, or once as plain text.

Owns the command line and the terminal. A thread polls the server, so that keys work even while the
server does not respond.
"""

import argparse
import codecs
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from penstock.loadtest.command_line import (
    API_KEY_VARIABLE,
    DEFAULT_URL,
    add_flags,
    exit_status,
    root_url,
)
from penstock.loadtest.top import view
from penstock.loadtest.top.scrape import (
    History,
    NotPenstock,
    Scrape,
    Scraper,
    ServerUnreachable,
    Window,
)
from penstock.loadtest.top.view import Line, View
from penstock.scheduler.errors import InvalidConfig, PenstockError

_QUIT_KEYS = b"qQ"
_ONCE_WIDTH = 100
_SGR = {"title": "1", "dim": "2", "good": "32", "fair": "33", "bad": "31"}
# The alternate screen, without cursor and line wrap; and back.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def main(argv: list[str]) -> int:
    """Returns the exit status; errors are one line on stderr."""
    options = make_parser().parse_args(argv)
    return exit_status(lambda: _top(options), "penstock top: error", interrupted=0)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock top",
        description="Watch a Penstock server in the terminal: throughput, latencies, how close the "
        "steps are to the hardware's limit, memory. q quits.",
    )
    add_flags(parser, _FLAGS, url={"nargs": "?", "default": DEFAULT_URL}, interval=_INTERVAL)
    return parser


def _top(options: argparse.Namespace) -> int:
    scraper = Scraper(root_url(options.url), options.api_key or os.environ.get(API_KEY_VARIABLE))
    if options.once:
        return _once(scraper, options.interval)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidConfig(
            "penstock top needs a terminal; add --once for one snapshot as plain text"
        )
    return _live(scraper, options.interval)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 60:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0.1 to 60")
    return seconds


_FLAGS = {
    "url URL": "the server's address (default: %(default)s)",
    "--interval SECONDS": "time between updates, from 0.1 to 60 (default: %(default)s)",
    "--api-key KEY": f"if the server requires one (default: ${API_KEY_VARIABLE})",
    "--once": "scrape twice, one interval apart, print plain text and exit (default: off)",
}
_INTERVAL = {"type": _interval, "default": 1.0}


def _once(scraper: Scraper, interval_s: float) -> int:
    history = History(view.MINUTE_S)
    try:
        history.add(scraper.scrape())
        time.sleep(interval_s)
        history.add(scraper.scrape())
    except ServerUnreachable as error:
        raise ServerUnreachable(f"{scraper.url} is unreachable: {error}") from error
    assert history.latest is not None
    long = ("since its start", Window(Scrape(0.0), history.latest))
    shown = View(url=scraper.url, history=history, long=long, glyphs=_glyphs())
    for line in view.draw(shown, _ONCE_WIDTH):
        print(view.text(line))
    sys.stdout.flush()
    return 0


def _glyphs() -> view.Glyphs:
    try:
        is_unicode = codecs.lookup(sys.stdout.encoding or "ascii").name.startswith("utf")
    except LookupError:
        is_unicode = False
    return view.UNICODE if is_unicode else view.ASCII


# The live view ------------------------------------------------------------------------------------


def _poll(
    scraper: Scraper, interval_s: float, wake_fd: int, updates: deque[Scrape | PenstockError]
) -> None:
    """Scrapes the server at every interval, and writes a byte to `wake_fd` after each scrape."""
    while True:
        begun_s = time.monotonic()
        try:
            updates.append(scraper.scrape())
        except PenstockError as error:
            updates.append(error)
        with suppress(OSError):  # the pipe is full while suspended, and closed at the end
            os.write(wake_fd, b"\0")
        time.sleep(max(0.05, interval_s - (time.monotonic() - begun_s)))


class _Display:
    def __init__(self, url: str) -> None:
        self._url = url
        self._history = History(view.MINUTE_S)
        self._error: str | None = None
        self._glyphs = _glyphs()
        has_colours = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._sgr = _SGR if has_colours else {}

    def apply(self, update: Scrape | PenstockError) -> None:
        """Raises NotPenstock before the first successful scrape: the address is wrong. After one,
        the server counts as unreachable, and may come back."""
        if isinstance(update, Scrape):
            self._history.add(update)
            self._error = None
        elif isinstance(update, NotPenstock) and self._history.latest is None:
            raise update
        else:
            self._error = str(update)

    def draw(self, width: int, height: int) -> str:
        """A frame as terminal output: each line overwrites the old one, so that nothing flickers.

        A line is cleared before it is written: afterwards the cursor may be on its last column,
        which would be cleared too.
        """
        lines = view.draw(self._view(), width, height)
        drawn = "\r\n".join(_CLEAR_LINE + self._styled(line) for line in lines)
        return _HOME + drawn + ("\r\n" + _CLEAR_BELOW if len(lines) < height else "")

    def _view(self) -> View:
        whole, latest = self._history.whole(), self._history.latest
        long = None
        if whole:
            is_full = whole.seconds > view.MINUTE_S - 2
            long = ("last minute" if is_full else f"last {whole.seconds:.0f} s", whole)
        return View(
            url=self._url,
            history=self._history,
            long=long,
            glyphs=self._glyphs,
            error=self._error,
            unreachable_s=time.monotonic() - latest.time_s if latest else 0.0,
            keys="q quits",
        )

    def _styled(self, line: Line) -> str:
        sgr = self._sgr
        return "".join(
            f"\x1b[{sgr[span.style]}m{span.text}\x1b[0m" if span.style in sgr else span.text
            for span in line
        )


def _live(scraper: Scraper, interval_s: float) -> int:
    with _wake_pipe() as (wake_fd, wake_from_fd), _Terminal() as screen:
        display, updates = _Display(scraper.url), deque[Scrape | PenstockError]()
        # A daemon: a thread that waits for a response must not keep the program from ending.
        poll = (scraper, interval_s, wake_from_fd, updates)
        threading.Thread(target=_poll, args=poll, daemon=True).start()
        screen.show(display)
        while True:
            ready, _, _ = select.select([sys.stdin, wake_fd], [], [])
            if sys.stdin in ready:
                keys = os.read(sys.stdin.fileno(), 1024)  # none where the terminal is closed
                if not keys or any(key in _QUIT_KEYS for key in keys):
                    return 0
            if wake_fd in ready:
                # A signal writes its number, the poller a zero.
                woken_by = os.read(wake_fd, 1024)
                if any(number in woken_by for number in _ENDING):
                    return 0
                if signal.SIGTSTP in woken_by:
                    screen.suspend()
            while updates:
                display.apply(updates.popleft())
            screen.show(display)


@contextmanager
def _wake_pipe() -> Iterator[tuple[int, int]]:
    """A pipe that ends the wait for a key: on a signal, or after a scrape."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    before_fd = signal.set_wakeup_fd(write_fd)
    numbers = (*_ENDING, signal.SIGWINCH, signal.SIGTSTP)
    # The handler has nothing to do: the signal's number is in the pipe, which the loop reads.
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield read_fd, write_fd
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        # The write end stays open: the poller may be about to write, and the process ends soon.
        os.close(read_fd)


# Ctrl-C too: as an exception it could be raised anywhere.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Terminal:
    """The terminal in use. Restored at the end, whatever the cause."""

    def __init__(self) -> None:
        import termios  # not at the top: Windows has none, and --once works there

        self._termios = termios
        self._fd = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._fd)

    def __enter__(self) -> "_Terminal":
        import tty

        tty.setcbreak(self._fd)
        self._write(_ENTER)
        return self

    def __exit__(self, *raised: object) -> None:
        self._write(_LEAVE)
        self._termios.tcsetattr(self._fd, self._termios.TCSADRAIN, self._before)

    def suspend(self) -> None:
        """Ctrl-Z: the shell gets its terminal back, until `fg`."""
        self.__exit__()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.__enter__()

    def show(self, display: _Display) -> None:
        size = os.get_terminal_size(sys.stdout.fileno())
        self._write(display.draw(size.columns, size.lines))

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
