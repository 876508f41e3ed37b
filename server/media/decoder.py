"""`ImageDecoder`: images become an encoder's input in other processes, which may die of them.

A decoder of images is the part of a server that an attacker reaches with the most complex bytes.
So the bytes are not looked at in this process: a few others (decoder_process.py) do that, each
image in a child with limits of memory and time. Threads wait for them, so that the event loop
neither waits nor copies; a process that ends, or does not answer, is replaced.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple

from penstock.scheduler.errors import InvalidConfig, PenstockError
from penstock.server.config import bare_environment
from penstock.server.errors import ImageQueueFull
from penstock.server.media.families import ImageFamily

logger = logging.getLogger("penstock")

_MODULE = "penstock.server.media.decoder_process"
NUM_PROCESSES = 2
MAX_WAITING = 256
# For an image whose turn it is. Its own CPU time is limited to less, so only an overloaded machine
# comes so far.
MAX_WALL_S = 30.0
MAX_START_S = 120.0  # transformers takes 4 s to import
_NUM_TRIES = 2  # the second is for a process that something else ended
_MAX_BYTES = 128 << 20  # of an image's patches: 16 million pixels, Qwen's most, take 96 MiB
_DIGEST_BYTES = 16


class BadImage(PenstockError):
    """Its message ends the sentence "the image cannot be read: ..."."""


class DecodedImage(NamedTuple):
    """An encoder's input; the fields are those of `penstock.scheduler.types.Insert`."""

    content: bytes
    patches: tuple[int, int]
    patch_grid: tuple[int, int, int]
    grid: tuple[int, int, int]
    digest: bytes

    @property
    def num_tokens(self) -> int:
        return math.prod(self.grid)


class _ProcessFailed(Exception):
    """It ended, did not answer in time, or lost a child to a signal that is not the image's."""


class ImageDecoder:
    """Reads images for one model. Lives on one event loop; `close` ends the processes."""

    def __init__(self, family: ImageFamily) -> None:
        self._model = json.dumps(
            {
                "directory": str(family.directory),
                "processor": family.processor,
                "patch_size": family.patch_size,
                "num_tokens": family.num_tokens,
                "max_bytes": _MAX_BYTES,
            }
        )
        self._threads = ThreadPoolExecutor(NUM_PROCESSES, thread_name_prefix="image")
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._all: set[_Process] = set()
        self._num_waiting = 0

    async def start(self) -> None:
        """Starts the first process, so that no image waits for that. Raises InvalidConfig where the
        model's image processor cannot be loaded."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._start)

    async def decode(
        self,
        file: str | bytes,
        *,
        max_side: int | None = None,
        options: Mapping[str, int] | None = None,
    ) -> DecodedImage:
        """file: bytes, or in base64. max_side, options: see `decoder_process.prepared`. Raises
        BadImage, and ImageQueueFull where too many wait or the processes fail."""
        if self._num_waiting >= MAX_WAITING:
            raise ImageQueueFull
        self._num_waiting += 1
        try:
            # A client that disconnects ends the waiting, not the work, whose process is in use.
            loop = asyncio.get_running_loop()
            asked = {"max_side": max_side, "options": dict(options or {})}
            return await loop.run_in_executor(self._threads, self._decode, file, asked)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Requests that still wait get an error."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in tuple(self._all):
            process.kill()

    def _start(self) -> None:
        process = _Process(self._model)
        self._all.add(process)
        try:
            process.start()
        except _ProcessFailed as error:
            process.kill()
            raise InvalidConfig(
                f"the model's image processor cannot be loaded: {error}; start the server with "
                "--language-model-only to serve its text alone"
            ) from error
        self._idle.put(process)

    def _decode(self, file: str | bytes, asked: dict[str, Any]) -> DecodedImage:
        asked["is_base64"] = isinstance(file, str)
        try:
            data = file.encode("ascii") if isinstance(file, str) else file
        except UnicodeEncodeError:
            raise BadImage("it is not valid base64") from None
        for _ in range(_NUM_TRIES):
            process = self._taken()
            try:
                reply, content = process.ask(data, asked)
            except (_ProcessFailed, OSError, ValueError) as error:
                self._all.discard(process)
                process.kill()
                logger.warning("a process that decodes images failed: %s", error)
                continue
            self._idle.put(process)
            if "error" in reply:
                raise BadImage(str(reply["error"]))
            return _checked(reply, content, self._model)
        raise ImageQueueFull

    def _taken(self) -> "_Process":
        with contextlib.suppress(queue.Empty):
            while True:
                if (process := self._idle.get_nowait()).is_alive:
                    return process
                process.kill()
                self._all.discard(process)
        process = _Process(self._model)
        self._all.add(process)
        return process


def _checked(reply: dict[str, Any], content: bytes, model: str) -> DecodedImage:
    """Nothing that comes from a process that has read an image is trusted but for its pixels."""
    patches, patch_grid, grid = (
        tuple(map(int, reply[name])) for name in ("patches", "patch_grid", "grid")
    )
    is_sound = (
        len(patches) == 2
        and len(patch_grid) == len(grid) == 3
        and math.prod(patches) == len(content)
        and math.prod(patch_grid) == patches[0]
        and 0 < math.prod(grid) <= patches[0]
    )
    if not is_sound:
        raise BadImage("what its decoder made of it is not sound")
    head = f"{model}{patches}{patch_grid}{grid}".encode()
    digest = hashlib.blake2b(head, digest_size=_DIGEST_BYTES)
    digest.update(content)
    return DecodedImage(content, patches, patch_grid, grid, digest.digest())  # type: ignore[arg-type]


class _Process:
    """Starts with its first image; answers one at a time. Its methods block."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Raises _ProcessFailed."""
        self._process = subprocess.Popen(
            (sys.executable, "-P", "-m", _MODULE, self._model),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a group of its own, to be killed with its child
            # One thread, so that a fork is whole; and one arena of memory, as in grammar_checker.
            env=bare_environment()
            | {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"}
            | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"},
        )
        with self._limited(MAX_START_S):
            reply, _ = self._reply()
        if "error" in reply:
            raise _ProcessFailed(str(reply["error"]))

    def ask(self, data: bytes, asked: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Raises _ProcessFailed, OSError or ValueError; then it must be killed."""
        if self._process is None:
            self.start()
        head = json.dumps(asked | {"num_bytes": len(data)}).encode()
        with self._limited(MAX_WALL_S):
            for part in (head, b"\n", data):
                self._pipe(is_input=True).write(part)
            self._pipe(is_input=True).flush()
            reply, content = self._reply()
        if "killed" in reply:
            raise _ProcessFailed("something killed its child; did the memory run out?")
        return reply, content

    def _reply(self) -> tuple[dict[str, Any], bytes]:
        line = self._pipe(is_input=False).readline()
        if not line:
            raise _ProcessFailed("it ended, or did not answer in time")
        reply: dict[str, Any] = json.loads(line)
        num_bytes = math.prod(reply.get("patches", (0,)))
        if not 0 <= num_bytes <= _MAX_BYTES:
            raise _ProcessFailed("it answered too much")
        content = self._pipe(is_input=False).read(num_bytes)
        return reply, content

    def _pipe(self, *, is_input: bool) -> BinaryIO:
        assert self._process and self._process.stdin and self._process.stdout
        return self._process.stdin if is_input else self._process.stdout  # type: ignore[return-value]

    @contextlib.contextmanager
    def _limited(self, timeout_s: float) -> Any:
        """Kills it after that time, which ends what waits for it."""
        timer = threading.Timer(timeout_s, self.kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def kill(self) -> None:
        """With its child; what waits for it ends."""
        if self._process is None:
            return
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError, ValueError):
                assert pipe
                pipe.close()
