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

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest
from hypothesis import settings

from tests.support.interpreter import hasten_interpreter
from tests.support.serving import MAX_MODEL_LEN, RunningServer

# What is imported stays, and is seen in vain by collections: until all is, a sixth of the time.
gc.disable()

# Hundreds of servers and commands are started: without its cache each compiles all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_collection_finish() -> None:
    """All modules of tests have been imported, and Triton with those that need it.

    Frozen, they are not visited again by each collection that code under test makes: half a second.
    """
    hasten_interpreter()
    gc.collect()
    gc.freeze()
    gc.enable()


settings.register_profile("penstock", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("penstock")


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Callable[..., RunningServer]]:
    """A server with these flags, ready: one for all tests of a process. Who asks for it neither
    ends it nor expects to be its only client: others have used it before."""
    with ExitStack() as running:

        @cache
        def serve(*flags: str) -> RunningServer:
            server = RunningServer(*flags)
            running.callback(server.stop)
            server.wait_until_ready()
            return server

        yield serve


@pytest.fixture(scope="session")
def scripted_server(shared_server: Callable[..., RunningServer]) -> RunningServer:
    return shared_server("--scripted", "--max-model-len", str(MAX_MODEL_LEN))


@pytest.fixture(scope="session")
def demo_server(shared_server: Callable[..., RunningServer]) -> RunningServer:
    """The demo model, whose answers have an end."""
    return shared_server("--num-threads", "1")


@pytest.fixture(scope="session")
def random_server(shared_server: Callable[..., RunningServer]) -> RunningServer:
    """The demo model with random weights, whose answers have any tokens."""
    return shared_server("--num-threads", "1", "--load-format", "dummy")


@pytest.fixture(scope="session")
def exact_server(shared_server: Callable[..., RunningServer]) -> RunningServer:
    """The demo model in float32, near enough to transformers' for its numbers to be compared."""
    return shared_server("--dtype", "float32")


def pytest_sessionfinish() -> None:
    """What the code under test froze can be collected again.

    Else nothing that a module refers to is freed at exit, and Triton's bindings, whose types and
    functions are then alive, print a page on leaks after pytest's last line.
    """
    gc.unfreeze()
