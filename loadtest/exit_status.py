"""How a command of a terminal ends: its exit status, and one line on stderr for what went wrong."""

import os
import sys
from collections.abc import Callable

from penstock.scheduler.errors import InvalidConfig, PenstockError

FAILED, USAGE_ERROR = 1, 2
INTERRUPTED = 130  # of a program that Ctrl-C ended, in a shell


def exit_status(run: Callable[[], int], command: str, *, interrupted: int = INTERRUPTED) -> int:
    """Returns the status that `run` returns, or that of its error. interrupted: that of Ctrl-C."""
    try:
        return run()
    except KeyboardInterrupt:
        return interrupted
    except BrokenPipeError:
        discard_output()
        return 0
    except PenstockError as error:
        print(f"{command}: error: {error}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, InvalidConfig) else FAILED


def require(is_valid: bool, flag: str, value: float, bounds: str) -> None:
    """Raises InvalidConfig unless the flag's value is valid. bounds: what it must be, in words."""
    if not is_valid:
        shown = f"{value:g}" if isinstance(value, float) else value
        raise InvalidConfig(f"{flag} is {shown}; it must be {bounds}")


def printer(command: str) -> Callable[[str], None]:
    """Returns what prints a line on stderr, after the command: stdout has the result alone."""
    return lambda text: print(f"{command}: {text}", file=sys.stderr, flush=True)


def discard_output() -> None:
    """For a reader of stdout that has closed it, as `| head -3` does: Python flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
