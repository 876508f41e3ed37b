"""One server of a comparison: its command, and its process from the start to the end.

A server is stopped by its process id, together with what it has started.
"""

import asyncio
import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from penstock.loadtest.bench.readiness import Model, wait_until_ready
from penstock.scheduler.errors import InvalidConfig, PenstockError

_NAME = re.compile(r"[\w.-]+")
_POLL_S = 0.1
_STOP_S = 30.0
_TAIL_BYTES, _TAIL_LINES = 4096, 10


class ServerFailed(PenstockError):
    """A server that cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """command: with {port}, and perhaps {model} and {threads}. extra_body: see `TargetConfig`."""

    name: str
    command: str
    extra_body: dict[str, Any] = field(default_factory=dict)

    def argv(self, **values: object) -> list[str]:
        """values: of the words in braces. Other braces, as of JSON, stay as they are."""
        words = shlex.split(self.command)
        for name, value in values.items():
            words = [word.replace(f"{{{name}}}", str(value)) for word in words]
        return words


def parse_server(text: str) -> ServerSpec:
    """NAME=COMMAND. Raises InvalidConfig."""
    name, is_pair, command = text.partition("=")
    if not (is_pair and _NAME.fullmatch(name)):
        raise InvalidConfig(
            f"--server {text!r} is not valid; write NAME=COMMAND, as in "
            "'llama=llama-server -m {model} --port {port}'"
        )
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InvalidConfig(f"--server {name}: {error} in its command") from error
    if not any("{port}" in word for word in words):
        raise InvalidConfig(f"--server {name}: its command needs {{port}}, where it must listen")
    return ServerSpec(name=name, command=command)


class Server:
    """The process of a server. Its output goes to a file, of which errors show the end."""

    def __init__(self, spec: ServerSpec, log: IO[bytes], *, model: str, threads: int) -> None:
        port = _free_port()
        self.spec = spec
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        argv = spec.argv(port=port, model=model, threads=threads)
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                start_new_session=True,  # so that Ctrl-C does not reach it, and killpg all of it
            )
        except OSError as error:
            raise ServerFailed(f"{argv[0]} cannot be started: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """Also of its session."""
        return self._process.pid

    async def models(self, timeout_s: float) -> list[Model]:
        """Waits until it is ready; raises ServerFailed, at once where the process has ended."""
        waiting = asyncio.ensure_future(
            wait_until_ready(
                self.url,
                timeout_s=timeout_s,
                say=lambda _: None,
                needs_models=False,
                advice="raise --ready-timeout",
            )
        )
        try:
            while not waiting.done():
                if self._has_ended():
                    raise ServerFailed(self.with_log("its process ended before it was ready"))
                await asyncio.wait({waiting}, timeout=_POLL_S)
            return await waiting
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    def with_log(self, message: str) -> str:
        """The message, and the last lines that the server wrote."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _TAIL_BYTES))
        lines = self._log.read().decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
        return "\n  ".join([f"{message}; the end of its log:", *lines]) if lines else message

    def stop(self) -> None:
        """Also what it has started, and if Ctrl-C interrupts the wait."""
        try:
            self._signal(signal.SIGTERM)
            deadline_s = time.monotonic() + _STOP_S
            while not self._has_ended() and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _has_ended(self) -> bool:
        """Without reaping it: as long as it is a zombie, no other process gets its id."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, options) is not None


@contextlib.contextmanager
def started(spec: ServerSpec, *, model: str, threads: int) -> Iterator[Server]:
    with tempfile.TemporaryFile() as log:
        server = Server(spec, log, model=model, threads=threads)
        try:
            yield server
        finally:
            server.stop()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
