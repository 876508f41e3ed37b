"""The command `penstock`, also as `python -m penstock`."""

import signal
import sys


def main() -> int:
    """Returns the exit code. While modules are imported, Ctrl-C ends it without a traceback."""
    is_wanted = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not under nohup
    if is_wanted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from penstock.server.command_line.cli import main as run

    if is_wanted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
