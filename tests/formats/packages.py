"""The packages that define the formats, from build/packers, where `make test-models` puts them.

They are not installed beside Penstock: some need other versions of torch and transformers than it
does, but not for the few functions that are called here.
"""

import importlib
import sys
import types
import warnings
from typing import Any

from tests.support.paths import ROOT

PACKERS = ROOT / "build" / "packers"
# Packages whose own __init__ imports what these functions do not need.
_WITHOUT_INIT = (
    *("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear"),
    *("awq", "awq.modules", "awq.modules.linear", "awq.utils"),
)


def imported(name: str) -> Any:
    """A module of theirs. Raises ImportError."""
    if str(PACKERS) not in sys.path:
        sys.path.append(str(PACKERS))  # at the end: one of them has a package named tests
    for package in _WITHOUT_INIT:
        if package not in sys.modules:
            module = types.ModuleType(package)
            module.__path__ = [str(PACKERS / package.replace(".", "/"))]
            sys.modules[package] = module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
