"""The URLs of the servers that `tests.clients` starts, for the clients that are pytest files."""

import json
import os
import urllib.request

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


@pytest.fixture(scope="session")
def template_length(demo: str) -> int:
    """How many tokens the demo model's chat template puts around a message."""
    counts = []
    for body in (
        {"messages": [{"role": "user", "content": "a"}]},
        {"prompt": "a", "add_special_tokens": False},
    ):
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(
            f"{demo}/tokenize", json.dumps(body).encode(), headers, method="POST"
        )
        with urllib.request.urlopen(request) as answer:
            counts.append(json.load(answer)["count"])
    return int(counts[0] - counts[1])
