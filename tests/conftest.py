"""What every test needs: threads that do not fight over the cores, and examples that repeat."""

import gc
import os
import sys
from pathlib import Path

# Before torch is imported anywhere: two spinning threads on busy cores slow everything tenfold.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Where there is no GPU, Triton's kernels run in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.serving import RunningServer

# Hundreds of servers and commands are started: without its cache each compiles all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile("penstock", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("penstock")


@pytest.fixture(scope="session")
def exact_server() -> Iterator[RunningServer]:
    """The demo model in float32, near enough to transformers' for its numbers to be compared."""
    server = RunningServer("--dtype", "float32")
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def pytest_sessionfinish() -> None:
    """What the code under test froze can be collected again.

    Else nothing that a module refers to is freed at exit, and Triton's bindings, whose types and
    functions are then alive, print a page on leaks after pytest's last line.
    """
    gc.unfreeze()
