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
import functools
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

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
# C++ has a library for each type of weights, so that nobody waits for what is not used.
_WEIGHTS = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}
# Of linear layers whose weights are codes. The C++ knows them by their places here.
CODE_FORMATS = (
    *(
        integer_format(bits, is_symmetric=symmetric)
        for bits in (8, 4)
        for symmetric in (True, False)
    ),
    LEVELS_FORMAT,
    block_format(4, has_minima=False),
    block_format(4, has_minima=True),
    block_format(5, has_minima=False),
    block_format(5, has_minima=True),
    block_format(6, has_minima=False),
    FP8_FORMAT,
)
_COMPILE = ("-std=c++20", "-O3", "-march=native", "-fPIC")
_SCRATCH = "compiling-"
_COMPILER_TIMEOUT_S = 300
_STALE_S = 2 * _COMPILER_TIMEOUT_S


@functools.cache
def load_library(
    dtype: torch.dtype, formats: frozenset[str] = frozenset(), has_coded_kv: bool = False
) -> ctypes.CDLL | None:
    """The library for weights of this type, or None if it cannot be compiled; then it logs why.

    formats: of weights; those of `CODE_FORMATS` are compiled besides plain ones. has_coded_kv:
    whether keys and values are of 8 bits.
    """
    mask = formats_mask(formats)
    macros = [f"-DPENSTOCK_WEIGHTS={_WEIGHTS[dtype]}"]
    if mask:
        macros.append(f"-DPENSTOCK_FORMATS={mask}")
    if has_coded_kv:
        macros.append("-DPENSTOCK_CODED_KV")
    # They are compiled at the same time; the one that takes longest comes first.
    names = ("step", "attention", "plain", *(["codes"] if mask else []))
    try:
        return _load(_Build(names, tuple(macros)))
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
    return _load(_Build(("ranks", "links")))


@functools.cache
def load_delta_net_library() -> ctypes.CDLL | None:
    """That of `delta_net.cpp`, or None if it cannot be compiled; then it logs why."""
    try:
        return _load(_Build(("delta_net",)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "the recurrence of this model's layers could not be compiled, so torch's operators "
            "compute it token by token, which is slow; install g++ to fix it (%s)",
            getattr(error, "stderr", None) or error,
        )
        return None


class _Build(NamedTuple):
    """What is compiled into a library, so that nobody waits for what is not used. names: of source
    files."""

    names: tuple[str, ...]
    macros: tuple[str, ...] = ()

    @property
    def sources(self) -> list[Path]:
        return [_FOLDER / f"{name}.cpp" for name in self.names]


def formats_mask(formats: Iterable[str]) -> int:
    """A bit for each of `CODE_FORMATS`; others are ignored."""
    return sum(1 << CODE_FORMATS.index(each) for each in {*formats} & {*CODE_FORMATS})


def _load(build: _Build) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(_compiled(_cache(), build)))
    except OSError as error:
        logger.info(
            "the CPU step is compiled at every start, because it cannot be cached: %s", error
        )
    with tempfile.TemporaryDirectory() as directory:  # a loaded library outlives its file
        return ctypes.CDLL(str(_compiled(Path(directory), build)))


def _cache() -> Path:
    """The directory that keeps it. Raises OSError for a user without a home, as in containers."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "penstock"
    except RuntimeError as error:
        raise OSError(str(error)) from None


def _compiled(cache: Path, build: _Build) -> Path:
    """The path of the library in that directory, compiled if it is not there yet.

    Raises OSError if it cannot be written there, SubprocessError if it cannot be compiled.
    """
    compiler = os.environ.get("CXX", "g++")
    flags = (
        *_COMPILE,
        *build.macros,
        *shlex.split(os.environ.get("CXXFLAGS", "")),
    )
    key = hashlib.sha256()
    for source in (*build.sources, *sorted(_FOLDER.glob("*.h"))):
        key.update(source.read_bytes())
    for part in (compiler, *flags, platform.machine(), _processor()):
        key.update(part.encode())
    library = cache / f"native-{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_stale(cache)
    logger.info(
        "compile: %s compiles %s for this processor, into %s",
        compiler,
        "the CPU step" if "step" in build.names else ", ".join(build.names),
        cache,
    )
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=cache) as scratch:
        # What a compiler that is killed leaves is then removed by the next one.
        environment = {**os.environ, "TMPDIR": scratch}

        def compiled(source: Path) -> str:
            output = str(Path(scratch, source.stem + ".o"))
            command = (compiler, *flags, "-c", str(source), "-o", output)
            _run_compiler(command, environment, group)
            return output

        with _group_of_compilers() as group:
            with ThreadPoolExecutor(num_cores()) as workers:
                objects = list(workers.map(compiled, build.sources))
            linked = Path(scratch, "native.so")
            command = (compiler, *flags, "-shared", "-pthread", *objects, "-o", str(linked))
            _run_compiler(command, environment, group)
        linked.replace(library)  # atomic, so that another process sees all of it or nothing
    return library


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
