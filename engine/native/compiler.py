"""Compiles C++ of the engine for this processor into a library that is kept in a cache.

It is kept in the user's cache directory; if that cannot be written, it is compiled at every start.

$CXX names another compiler than g++, and $CXXFLAGS adds to its flags: CXXFLAGS=-march=x86-64-v3
compiles for processors that have no AVX-512.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from penstock.engine.memory.machine import num_cores

logger = logging.getLogger(__name__)

ENGINE = Path(__file__).parents[1]
"""The folder that the sources and what they include are named from."""

_HEADERS = ("native/**/*.h", "models/parts/**/*.h")
# Functions begin with a cache line: else where their loops lie depends on what is compiled beside
# them, and so does their speed.
_COMPILE = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-falign-functions=64")
_LINK = ("-shared", "-pthread")
# All else is a library's own. GCC makes tables in functions unique in a process, so that a library
# for one kind of processor would call what another has.
_EXPORTS = "{ global: penstock_*; local: *; };"
_SCRATCH = "compiling-"
_COMPILER_TIMEOUT_S = 300
_STALE_S = 2 * _COMPILER_TIMEOUT_S
_LOOK_AGAIN_S = 0.05


class Source(NamedTuple):
    """A source file, and what it is compiled for, if it knows that: nobody waits for what is not
    used, nor for what another model has used before.

    module: its path in the engine's folder, without the ending.
    """

    module: str
    macro: str = ""

    @property
    def name(self) -> str:
        return Path(self.module).name

    @property
    def path(self) -> Path:
        return ENGINE / f"{self.module}.cpp"


def cache_directory() -> Path:
    """Returns where libraries are kept. Raises OSError for a user without a home, as in
    containers."""
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return caches / "penstock" / "native"
    except RuntimeError as error:
        raise OSError(str(error)) from None


def compiled(cache: Path, sources: Sequence[Source]) -> Path:
    """Returns the path of the library in that directory, compiled if it is not there yet. Raises
    OSError if it cannot be written there, SubprocessError if it cannot be compiled."""
    compiler = os.environ.get("CXX", "g++")
    command = (compiler, *_COMPILE, *shlex.split(os.environ.get("CXXFLAGS", "")))
    objects = _objects(cache, sources, command)
    parts = [*_LINK, _EXPORTS, *(each.name for each in objects.values())]
    key = hashlib.sha256("".join(parts).encode())
    library = cache / f"{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_stale(cache)
    logger.info(
        "compile: %s compiles %s for this processor, into %s",
        compiler,
        "the CPU step" if sources[0].name == "step" else ", ".join(each.name for each in sources),
        cache,
    )
    with (
        tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=cache) as scratch,
        _group_of_compilers() as group,
    ):
        _Compilation(command, Path(scratch), group).make(objects, library)
    return library


class _Compilation(NamedTuple):
    """command: the compiler and its flags. scratch: a directory that is removed afterwards. group:
    the process group that compilers run in."""

    command: Sequence[str]
    scratch: Path
    group: int

    def make(self, objects: Mapping[Source, Path], library: Path) -> None:
        """Compiles the objects that are missing, and links all of them."""
        missing = [source for source, path in objects.items() if not path.exists()]
        paths = [objects[source] for source in missing]
        with ThreadPoolExecutor(num_cores()) as workers:
            for waits in (False, True):  # what another process compiles now comes last
                list(workers.map(partial(self._compile, waits=waits), missing, paths))
        exports = self.scratch / "exports"
        exports.write_text(_EXPORTS)
        link = (*_LINK, f"-Wl,--version-script={exports}", *map(str, objects.values()))
        self._run(link, library)

    def _compile(self, source: Source, path: Path, *, waits: bool) -> None:
        with _alone(path, waits=waits) as is_alone:
            if is_alone and not path.exists():
                macros = (source.macro,) if source.macro else ()
                self._run((f"-I{ENGINE}", *macros, "-c", str(source.path)), path)

    def _run(self, arguments: Sequence[str], path: Path) -> None:
        output = self.scratch / path.name
        try:
            subprocess.run(
                (*self.command, *arguments, "-o", str(output)),
                # Another one then removes what a compiler leaves that is killed.
                env={**os.environ, "TMPDIR": str(self.scratch)},
                process_group=self.group,
                check=True,
                capture_output=True,
                text=True,
                timeout=_COMPILER_TIMEOUT_S,
            )
        except OSError as error:
            raise subprocess.SubprocessError(str(error)) from None
        output.replace(path)  # atomic, so that others see all of it or nothing


def _objects(cache: Path, sources: Sequence[Source], command: Sequence[str]) -> dict[Source, Path]:
    """Returns where what is compiled of each of them is kept."""
    headers = hashlib.sha256()
    for header in sorted(header for pattern in _HEADERS for header in ENGINE.glob(pattern)):
        headers.update(header.read_bytes())
    for part in (*command, platform.machine(), _processor()):
        headers.update(part.encode())
    objects = {}
    for source in sources:
        key = headers.copy()
        key.update(source.path.read_bytes())
        key.update(source.macro.encode())
        objects[source] = cache / f"{source.name}-{key.hexdigest()[:16]}.o"
    return objects


@contextlib.contextmanager
def _alone(path: Path, *, waits: bool) -> Iterator[bool]:
    """Yields whether no other process is in here with this path, which is so at last if it waits.

    The end of a process, whatever ends it, lets the next one in; so does one that takes too long.
    """
    lock = path.with_suffix(".lock")
    with lock.open("w") as file:
        until = time.monotonic() + (_COMPILER_TIMEOUT_S if waits else 0)
        while not (is_alone := _is_locked(file)) and time.monotonic() < until:
            time.sleep(_LOOK_AGAIN_S)
        yield is_alone or waits
        if is_alone:
            lock.unlink(missing_ok=True)


def _is_locked(file: IO[str]) -> bool:
    """Locks it for this process, if no other has; returns True too where the file system has no
    locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _remove_stale(cache: Path) -> None:
    """Removes what processes left that were killed while they compiled."""
    for scratch in cache.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # another process removes it at the same time
            if time.time() - scratch.stat().st_mtime > _STALE_S:
                shutil.rmtree(scratch)


@contextlib.contextmanager
def _group_of_compilers() -> Iterator[int]:
    """Yields the number of a process group that ends with this process, whatever ends that.

    Its first process reads a pipe of which this process alone holds the other end: that closes
    with it, also after SIGKILL. PR_SET_PDEATHSIG would end the compiler's first process alone, and
    not those that it has started.
    """
    command = ("/bin/sh", "-c", "read -r line || kill -9 0")
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0
    ) as watchdog:
        try:
            yield watchdog.pid
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(watchdog.pid, signal.SIGKILL)
            raise
        assert watchdog.stdin
        watchdog.stdin.write(b"all have ended\n")


def _processor() -> str:
    """Returns what -march=native depends on: different machines may share a home directory."""
    with Path("/proc/cpuinfo").open(encoding="utf-8") as cpuinfo:
        return next((line for line in cpuinfo if line.startswith(("flags", "Features"))), "")
