"""Commands that tests wait for, and that start processes of their own."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_to_end(
    command: Sequence[str], *, folder: Path, env: Mapping[str, str], timeout_s: float
) -> None:
    """Raises AssertionError with what it wrote if it fails or takes longer. Then none of its
    processes is left, which would slow down what runs next."""
    # Not a pipe: that would be read until the last of the processes ends.
    with tempfile.TemporaryFile("w+") as written:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **env},
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        written.seek(0)
        assert code == 0, f"exit code {code}\n{written.read()}"
