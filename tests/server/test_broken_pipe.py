"""Output that nobody reads any more, as under `penstock serve 2>&1 | head`, and output that waits
for its reader, as under `| sleep 1000`."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import TextIO

import httpx
import pytest

from penstock.engine.config import EngineConfig
from penstock.server.config import ServeConfig, ServerConfig
from penstock.server.service import EXIT_ENGINE_DIED, Service, State
from tests.support.paths import DEMO_MODEL, ROOT
from tests.support.serving import MODEL, free_port, wait_until


def unread_pipe() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


async def test_an_error_that_cannot_be_printed_still_ends_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ServeConfig(
        server=ServerConfig(served_model_names=(MODEL,)),
        engine=EngineConfig(model=str(DEMO_MODEL), scripted=True),
    )
    service = Service(config)
    with unread_pipe() as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        await service._fail("the engine ended", EXIT_ENGINE_DIED)
    assert service.state is State.DEAD
    assert service.over.result() == EXIT_ENGINE_DIED


async def test_what_fails_while_it_ends_does_not_keep_it_from_ending() -> None:
    config = ServeConfig(
        server=ServerConfig(served_model_names=(MODEL,)),
        engine=EngineConfig(model=str(DEMO_MODEL), scripted=True),
    )
    service = Service(config)

    async def fail() -> None:
        raise RuntimeError("no")

    service.close = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        await service.drain("SIGTERM")
    assert service.over.done()


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """Its writing end; nobody reads, and not a byte more fits."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"\n" * 4096)
    os.set_blocking(writer, True)
    yield writer
    os.close(reader)
    os.close(writer)


@pytest.mark.slow
def test_output_that_nobody_reads_stops_neither_the_server_nor_its_end(full_pipe: int) -> None:
    port = free_port()
    command = [sys.executable, "-m", "penstock", "serve", "--scripted", "--log-level", "debug"]
    server = subprocess.Popen(
        [*command, "--port", str(port)], cwd=ROOT, stdout=full_pipe, stderr=full_pipe
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: _status(f"{url}/ready") == 200)
        for _ in range(20):  # each is a line of the server and two of the engine
            body = {"model": MODEL, "prompt": "Once", "max_tokens": 2}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.wait()


def test_a_server_whose_streams_are_closed_serves_and_writes_nothing_to_its_clients() -> None:
    port = free_port()
    command = [sys.executable, "-m", "penstock", "serve", "--scripted", "--log-level", "debug"]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command, "--port", str(port)]
    server = subprocess.Popen(closed, cwd=ROOT)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: server.poll() is not None or _status(f"{url}/ready") == 200)
        with httpx.Client() as client:  # one connection, for several lines of the log
            for _ in range(5):
                body = {"model": MODEL, "prompt": "Once", "max_tokens": 2}
                assert client.post(f"{url}/v1/completions", json=body).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.wait()


def _status(url: str) -> int:
    try:
        return httpx.get(url, timeout=10).status_code
    except httpx.TransportError:
        return 0
