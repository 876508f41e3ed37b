"""A command in a pseudo-terminal: what it draws, and keys for it."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from typing import Self

from tests.support.serving import wait_until


class Terminal:
    """A process whose input and output it is; a Ctrl-C that is pressed is a SIGINT to it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.main_fd, self.fd = pty.openpty()
        self.before = termios.tcgetattr(self.fd)
        self.output = ""
        self.resize(24, 80)
        self.process = subprocess.Popen(
            command,
            env={"TERM": "xterm"} | dict(env),
            preexec_fn=self._become_foreground,
        )

    def _become_foreground(self) -> None:
        os.login_tty(self.fd)
        # Ignored in what a shell runs in the background, as these tests may be.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.main_fd)
        os.close(self.fd)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, key: bytes) -> None:
        os.write(self.main_fd, key)

    def read(self, seconds: float = 0.05) -> str:
        """What it has written, and writes in the next moment; of what never pauses, a second's."""
        new = b""
        deadline_s = time.monotonic() + 1
        while time.monotonic() < deadline_s and select.select([self.main_fd], [], [], seconds)[0]:
            new += os.read(self.main_fd, 65536)
        self.output += new.decode("utf-8", "replace")
        return self.output

    def wait_for(self, words: str) -> None:
        wait_until(lambda: re.search(words, plain(self.read())))

    def exit_code(self) -> int:
        # Keep reading: a process that writes to a full terminal waits forever.
        wait_until(lambda: (self.read(), self.process.poll() is not None)[1])
        self.read()
        return self.process.wait()


def plain(output: str) -> str:
    """Without colours and movements of the cursor."""
    return re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", output)
