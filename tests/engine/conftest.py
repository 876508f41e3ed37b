"""Fixtures for tests of the engine."""

import hashlib
import platform
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engine.native import trial
from penstock.engine.native.library import load_library
from tests.support.compiler import HAS_COMPILER


def _emulated(march: str, header: str) -> str:
    """Returns flags that include a header, such that the library is compiled again when it
    changes."""
    path = Path(__file__).with_name("native") / header
    version = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"-march={march} -include {shlex.quote(str(path))} -DVERSION={version}"


EMULATION = _emulated("native", "emulated_amx.h")
# What the compiler is told, and what a processor needs to run that. What is native is compiled as
# for users, and so for other tests.
_PROCESSORS = {
    "vectors of 4": ("-march=x86-64", ""),
    "AVX2": ("-march=x86-64-v3", "avx2"),
    "AVX-512": ("-march=x86-64-v4", "avx512vl"),
    "VNNI": (_emulated("x86-64-v3", "emulated_avx512.h"), "avx2"),
    "tiles": (EMULATION, ""),
    "native": ("", ""),
}
if platform.machine() != "x86_64":
    _PROCESSORS = {kind: _PROCESSORS[kind] for kind in ("tiles", "native")}


# Each takes a compilation for every type of weights.
_SLOW = ("vectors of 4", "AVX2", "AVX-512", "VNNI", "tiles")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=pytest.mark.slow) if kind in _SLOW else kind
        for kind in _PROCESSORS
    ],
)
def processor(request: pytest.FixtureRequest) -> Iterator[str]:
    """While it lasts, the compiled step is the one for that kind of processor."""
    if not HAS_COMPILER:
        pytest.skip("there is no C++ compiler here")
    flags, needed = _PROCESSORS[request.param]
    if needed not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor lacks {needed}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXXFLAGS", flags and f"-O1 -Wno-psabi {flags}")
        if request.param == "tiles":  # which are emulated: used though they are slow
            patch.setattr(trial, "_slow_ways", lambda *_: 0)
        load_library.cache_clear()
        yield request.param
    load_library.cache_clear()
