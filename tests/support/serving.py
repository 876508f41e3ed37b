"""Shared by the server's tests: a real server process on a free port, with scripted tokens."""

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.support.paths import ROOT

MODEL, ALIAS = "penstock-demo", "demo"
# Allows streams of seconds: the scripted executor makes about ten thousand tokens a second.
MAX_MODEL_LEN = 60_000
# Else each request reads all certificates that the system trusts, and takes ten times as long.
_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_START_TIMEOUT_S = 120.0  # the first start compiles engine/native, on a busy machine slowly


class RunningServer:
    """A `penstock serve` process, and requests to it."""

    def __init__(
        self,
        *flags: str,
        port: int | None = None,
        prefix: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """prefix: a command that runs the server. env: variables besides those of this process."""
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "penstock", "serve", "--port", str(self.port), *flags]
        # Not a pipe: unread, it would be full at 64 KiB and block a server that writes more.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*prefix, *command],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        defaults = {"timeout": 60, "verify": _NO_CERTIFICATES}
        return httpx.request(method, self.url + path, **{**defaults, **options})

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **options)

    def complete(self, **fields: Any) -> httpx.Response:
        """`POST /v1/completions` with a prompt and a seed unless others are given."""
        body = {"model": MODEL, "prompt": "Once", "max_tokens": 8, "seed": 1} | fields
        return self.post("/v1/completions", body)

    def chat(self, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Who are you?"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 8, "seed": 1} | fields
        return self.post("/v1/chat/completions", body)

    def metric(self, name: str) -> float:
        """The value of a sample, given by name and labels; 0 if it does not exist yet."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(f"penstock_{name} "):
                return float(line.rpartition(" ")[2])
        return 0.0

    def wait_until_answering(self) -> httpx.Response:
        """The first response of any kind."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                return self.get("/v1/models")
            time.sleep(0.02)
        raise AssertionError(f"the server never answered; exit code {self.process.poll()}")

    def wait_until_ready(self) -> None:
        self.wait_until_answering()
        wait_until(lambda: self.get("/ready").status_code == 200, timeout_s=_START_TIMEOUT_S)

    def wait_until_idle(self) -> None:
        """Waits until nothing runs and no KV block is in use."""
        names = ("running_sequences", "waiting_sequences", "kv_used_blocks")
        wait_until(lambda: not any(self.metric(name) for name in names))

    def exit_code(self, timeout_s: float = 60.0) -> tuple[int, str]:
        """Waits for its end; returns the code and the text on stderr."""
        code = self.process.wait(timeout_s)
        with self._errors as errors:
            errors.seek(0)
            return code, errors.read()

    def log(self) -> str:
        """What it has written to stderr until now."""
        return Path(f"/proc/self/fd/{self._errors.fileno()}").read_text(encoding="utf-8")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._errors.close()


@contextlib.contextmanager
def running_server(
    *flags: str, is_ready: bool = True, prefix: tuple[str, ...] = ()
) -> Iterator[RunningServer]:
    """prefix: see `RunningServer`."""
    length = ("--max-model-len", str(MAX_MODEL_LEN))
    server = RunningServer("--scripted", *length, *flags, prefix=prefix)
    try:
        if is_ready:
            server.wait_until_ready()
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def ready(*servers: RunningServer) -> Iterator[tuple[RunningServer, ...]]:
    """Those that were started together, once all of them are ready; stops them."""
    try:
        for server in servers:
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers:
            server.stop()


def refusal(*arguments: str) -> str:
    """The last line on stderr of a server that does not start."""
    server = RunningServer(*arguments)
    try:
        code, errors = server.exit_code(timeout_s=120)
    finally:
        server.stop()
    assert code == 2, errors
    assert "Traceback" not in errors, errors
    last = errors.splitlines()[-1]
    assert last.startswith("penstock: error: "), errors
    return last


def wait_until(condition: Any, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not become true in time"
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
