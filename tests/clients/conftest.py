"""The URLs of the servers that `tests.clients` starts, for the clients that are pytest files."""

import os

import pytest


@pytest.fixture(scope="session")
def demo() -> str:
    """The base URL of a server with the demo model."""
    return os.environ["PENSTOCK_DEMO"]


@pytest.fixture(scope="session")
def scripted() -> str:
    """The base URL of a server with scripted tokens, which are fast and endless."""
    return os.environ["PENSTOCK_SCRIPTED"]


@pytest.fixture(scope="session")
def guarded() -> str:
    """The base URL of a scripted server that requires the key `secret`."""
    return os.environ["PENSTOCK_GUARDED"]
