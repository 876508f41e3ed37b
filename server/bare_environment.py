"""The environment of processes that work on what a client has sent: keys and tokens of the server
are none of it."""

import os
from pathlib import Path

_NEEDED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")


def bare_environment() -> dict[str, str]:
    """No more than the interpreter needs to run a module of this package."""
    needed = {name: os.environ[name] for name in _NEEDED_VARIABLES if name in os.environ}
    return needed | {"PYTHONPATH": str(Path(__file__).parents[2])}
