"""The servers that `tests.clients` has started, for the clients that run as pytest files."""

import os

import pytest


@pytest.fixture(scope="session")
def demo() -> str:
    """The base URL of a server with the demo model."""
    return os.environ["PENSTOCK_DEMO"]


@pytest.fixture(scope="session")
def scripted() -> str:
    """The base URL of a server with made-up tokens, quick and without end."""
    return os.environ["PENSTOCK_SCRIPTED"]


@pytest.fixture(scope="session")
def guarded() -> str:
    """The base URL of a scripted server that asks for the key `secret`."""
    return os.environ["PENSTOCK_GUARDED"]
