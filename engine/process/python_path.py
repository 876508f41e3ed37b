"""Where processes of this package find it."""

import os
import sysconfig
from pathlib import Path


def python_path() -> str:
    """`PYTHONPATH` of `python -P -m penstock...`: what it is here, and before it the folder of this
    package, which may be a checkout that is not installed."""
    folder, given = str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")
    # What is installed is found after Python's own modules, of whose names some packages have one.
    if folder == sysconfig.get_path("purelib"):
        return given
    return os.pathsep.join(filter(None, (folder, given)))
