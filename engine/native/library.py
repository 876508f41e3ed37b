"""Compiles the C++ of this folder, if there is a compiler.

The library is compiled for this processor when it is first needed, and kept in the user's cache
directory; if that cannot be written, it is compiled at every start. Without a compiler,
`load_library` logs a warning and returns None, and `penstock.engine.models.llama` computes the same
in torch.

$CXX names another compiler than g++, and $CXXFLAGS adds to its flags: CXXFLAGS=-march=x86-64-v3
compiles for processors that have no AVX-512.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import itertools
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

import torch

from penstock.engine.memory.machine import num_cores
from penstock.engine.models.quantization.schemes import (
    FP8_FORMAT,
    LEVELS_FORMAT,
    block_format,
    integer_format,
)

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_WEIGHTS = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}
# The sources for linear layers whose weights are codes, and what they multiply. The C++ counts them
# in this order, from 1.
_FORMATS = {
    "grouped": (
        *(
            integer_format(bits, is_symmetric=symmetric)
            for bits in (8, 4)
            for symmetric in (True, False)
        ),
        LEVELS_FORMAT,
    ),
    "blocks": (
        block_format(4, has_minima=False),
        block_format(4, has_minima=True),
        block_format(5, has_minima=False),
        block_format(5, has_minima=True),
        block_format(6, has_minima=False),
    ),
    "fp8": (FP8_FORMAT,),
}
CODE_FORMATS = tuple(itertools.chain.from_iterable(_FORMATS.values()))
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


@functools.cache
def load_library(
    dtype: torch.dtype, formats: frozenset[str] = frozenset(), has_coded_kv: bool = False
) -> ctypes.CDLL | None:
    """The library for weights of this type, or None if it cannot be compiled; then it logs why.

    formats: of weights; those of `CODE_FORMATS` are compiled besides plain ones. has_coded_kv:
    whether keys and values are of 8 bits.
    """
    weights = f"-DPENSTOCK_WEIGHTS={_WEIGHTS[dtype]}"
    # They are compiled at the same time; those that take longest come first.
    sources = [
        _Source("step"),
        _Source("attention", "-DPENSTOCK_CODED_KV" if has_coded_kv else weights),
        *(_Source(name) for name in ("grouped", "blocks") if formats & {*_FORMATS[name]}),
        _Source("plain", weights),
        *([_Source("fp8", weights)] if FP8_FORMAT in formats else []),
    ]
    try:
        return _load(sources)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.warning(
            "the CPU step could not be compiled, so torch's operators are used instead, which are "
            "slower for small batches; install g++ to fix it (%s)",
            reason,
        )
        return None


@functools.cache
def load_ranks_library() -> ctypes.CDLL:
    """The collectives of `ranks.cpp`, and `links.cpp`. Raises OSError, or SubprocessError of the
    compiler."""
    return _load([_Source("ranks"), _Source("links")])


@functools.cache
def load_delta_net_library() -> ctypes.CDLL | None:
    """That of `delta_net.cpp`, or None if it cannot be compiled; then it logs why."""
    try:
        return _load([_Source("delta_net")])
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "the recurrence of this model's layers could not be compiled, so torch's operators "
            "compute it token by token, which is slow; install g++ to fix it (%s)",
            getattr(error, "stderr", None) or error,
        )
        return None


class _Source(NamedTuple):
    """A source file, and what it is compiled for, if it knows that: nobody waits for what is not
    used, nor for what another model has used before."""

    name: str
    macro: str = ""

    @property
    def path(self) -> Path:
        return _FOLDER / f"{self.name}.cpp"


def format_number(weight_format: str) -> int:
    """`Linear::format` of structs.h."""
    return 1 + next(i for i, of in enumerate(_FORMATS.values()) if weight_format in of)


def _load(sources: Sequence[_Source]) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(_compiled(_cache(), sources)))
    except OSError as error:
        logger.info(
            "the CPU step is compiled at every start, because it cannot be cached: %s", error
        )
    with tempfile.TemporaryDirectory() as directory:  # a loaded library outlives its file
        return ctypes.CDLL(str(_compiled(Path(directory), sources)))


def _cache() -> Path:
    """The directory that keeps it. Raises OSError for a user without a home, as in containers."""
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return caches / "penstock" / "native"
    except RuntimeError as error:
        raise OSError(str(error)) from None


def _compiled(cache: Path, sources: Sequence[_Source]) -> Path:
    """The path of the library in that directory, compiled if it is not there yet.

    Raises OSError if it cannot be written there, SubprocessError if it cannot be compiled.
    """
    compiler = os.environ.get("CXX", "g++")
    flags = (*_COMPILE, *shlex.split(os.environ.get("CXXFLAGS", "")))
    objects = _objects(cache, sources, (compiler, *flags))
    parts = [*_LINK, _EXPORTS, *(each.name for each in objects.values())]
    key = hashlib.sha256("".join(parts).encode())
    library = cache / f"{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_stale(cache)
    missing = [source for source in sources if not objects[source].exists()]
    logger.info(
        "compile: %s compiles %s for this processor, into %s",
        compiler,
        "the CPU step" if sources[0].name == "step" else ", ".join(each.name for each in sources),
        cache,
    )
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=cache) as scratch:
        # What a compiler that is killed leaves is then removed by the next one.
        environment = {**os.environ, "TMPDIR": scratch}

        def compile_one(source: _Source, *, waits: bool) -> None:
            with _alone(objects[source], waits=waits) as is_alone:
                if not is_alone or objects[source].exists():
                    return
                output = Path(scratch, objects[source].name)
                macros = (source.macro,) if source.macro else ()
                command = (compiler, *flags, *macros, "-c", str(source.path), "-o", str(output))
                _run_compiler(command, environment, group)
                output.replace(objects[source])  # atomic, so that others see all of it or nothing

        with _group_of_compilers() as group:
            with ThreadPoolExecutor(num_cores()) as workers:
                for waits in (False, True):  # what another process compiles now comes last
                    list(workers.map(partial(compile_one, waits=waits), missing))
            linked, exports = Path(scratch, library.name), Path(scratch, "exports")
            exports.write_text(_EXPORTS)
            link = (*_LINK, f"-Wl,--version-script={exports}", *map(str, objects.values()))
            command = (compiler, *flags, *link, "-o", str(linked))
            _run_compiler(command, environment, group)
        linked.replace(library)
    return library


def _objects(
    cache: Path, sources: Sequence[_Source], command: Sequence[str]
) -> dict[_Source, Path]:
    """Where what is compiled of each of them is kept."""
    headers = hashlib.sha256()
    for header in sorted(_FOLDER.glob("*.h")):
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
    """Whether no other process is in here with this path, which is so at last if it waits: the end
    of a process, whatever ends it, lets the next one in; so does one that takes too long."""
    lock = path.with_suffix(".lock")
    with lock.open("w") as file:
        until = time.monotonic() + (_COMPILER_TIMEOUT_S if waits else 0)
        while not (is_alone := _is_locked(file)) and time.monotonic() < until:
            time.sleep(_LOOK_AGAIN_S)
        yield is_alone or waits
        if is_alone:
            lock.unlink(missing_ok=True)


def _is_locked(file: IO[str]) -> bool:
    """For this process, from now on; or where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _remove_stale(cache: Path) -> None:
    """What processes left that were killed while they compiled."""
    for scratch in cache.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # another process removes it at the same time
            if time.time() - scratch.stat().st_mtime > _STALE_S:
                shutil.rmtree(scratch)


@contextlib.contextmanager
def _group_of_compilers() -> Iterator[int]:
    """The number of a process group that ends with this process, whatever ends that.

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


def _run_compiler(command: Sequence[str], environment: Mapping[str, str], group: int) -> None:
    try:
        subprocess.run(
            command,
            env=environment,
            process_group=group,
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMPILER_TIMEOUT_S,
        )
    except OSError as error:
        raise subprocess.SubprocessError(str(error)) from None


def _processor() -> str:
    """What -march=native depends on: different machines may share a home directory."""
    with Path("/proc/cpuinfo").open(encoding="utf-8") as cpuinfo:
        return next((line for line in cpuinfo if line.startswith(("flags", "Features"))), "")
