"""Many connections, and slow ones: what they cost, and which errors they get."""

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from uvicorn.server import ServerState

from penstock.server.errors import BodyTooSlow, TooManyLargeBodies, reply_to
from penstock.server.http import body, connection
from penstock.server.http.body import BodyMemory, read_body
from penstock.server.http.connection import HttpProtocol, spare_files
from tests.support.serving import RunningServer, running_server, wait_until

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
NUM_FILES = 256


COMPLETION = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"


@pytest.fixture
def cramped() -> Iterator[RunningServer]:
    """A server that may open few files."""
    with running_server(prefix=("prlimit", f"--nofile={NUM_FILES}:{NUM_FILES}")) as server:
        yield server


def connected(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def test_a_connection_beyond_the_limit_of_open_files_gets_a_503(cramped: RunningServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_FILES - spare_files(NUM_FILES)):
            connection = stack.enter_context(connected(cramped))
            connection.sendall(COMPLETION[:-2])  # its body does not come, so it is never idle
        refused = connection.recv(1 << 12)
        assert refused.startswith(b"HTTP/1.1 503 ") and b"\r\nRetry-After: " in refused
        assert b"256 files" in refused and b"too_many_connections" in refused
    wait_until(lambda: cramped.complete().status_code == 200)
    wait_until(lambda: "allow it 512 or more" in cramped.log())


@pytest.mark.slow
def test_health_answers_while_more_clients_are_connected_than_files_may_be_open(
    cramped: RunningServer,
) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3 * NUM_FILES):
            stack.enter_context(connected(cramped))  # and says nothing
        # Not after HEAD_TIMEOUT_S, when the server closes connections without a request.
        wait_until(lambda: _status(cramped, "/health") == 200)
        assert cramped.log().count("too many connections") == 1


def test_idle_connections_make_room_for_new_ones(cramped: RunningServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_FILES - spare_files(NUM_FILES)):
            connection = stack.enter_context(connected(cramped))
            connection.sendall(HEALTH)
            assert connection.recv(1 << 12)
        wait_until(lambda: _status(cramped, "/v1/models") == 200)


def _status(server: RunningServer, path: str) -> int:
    try:
        return server.get(path).status_code
    except httpx.TransportError:
        return 0


def test_the_server_may_open_all_the_files_that_its_hard_limit_lets_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 256), hard))
    try:
        with running_server() as server:
            limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert limits == (hard, hard)


async def _never_answer(scope: object, receive: object, send: object) -> None:
    await asyncio.sleep(3600)


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """Of a listener that waits for headers but a moment."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    config = uvicorn.Config(_never_answer, lifespan="off", log_config=None, interface="asgi3")
    state = ServerState()
    listener = await asyncio.get_running_loop().create_server(
        lambda: HttpProtocol(config, state, {}), "127.0.0.1", 0
    )
    yield listener.sockets[0].getsockname()[1]
    listener.close()
    tasks = [*state.tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_headers_that_do_not_come_in_time_are_a_408(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEALTH[:-2])
    answer = await asyncio.wait_for(reader.read(), 10)
    assert answer.startswith(b"HTTP/1.1 408 ") and b"request_timeout" in answer
    writer.close()


async def test_trailers_are_no_larger_than_headers_may_be(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_HEAD_BYTES", 10_000)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        COMPLETION.partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"
    )
    await writer.drain()
    await asyncio.sleep(0.05)  # else what follows is read together with it
    for _ in range(5):  # the last is beyond the limit
        writer.write(b"a: " + b"b" * 2_100 + b"\r\n")
        await asyncio.sleep(0.01)
    answer = await asyncio.wait_for(reader.read(), 10)
    assert answer.startswith(b"HTTP/1.1 431 ") and b"headers_too_large" in answer
    writer.close()


async def test_bodies_of_any_size_are_no_headers(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_HEAD_BYTES", 10_000)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(COMPLETION.partition(b"Content-Length")[0] + b"Content-Length: 30000\r\n\r\n")
    for _ in range(15):
        writer.write(b" " * 2_000)
        await asyncio.sleep(0.01)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(), 0.2)
    writer.close()


async def _answer_at_length(scope: object, receive: object, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(1_000):
        await send({"type": "http.response.body", "body": b"a" * (1 << 16), "more_body": True})


async def test_a_client_that_reads_nothing_for_long_is_disconnected_and_a_slow_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "READ_STALL_S", 0.5)
    config = uvicorn.Config(_answer_at_length, lifespan="off", log_config=None, interface="asgi3")
    state = ServerState()
    listener = await asyncio.get_running_loop().create_server(
        lambda: HttpProtocol(config, state, {}), "127.0.0.1", 0
    )
    address = listener.sockets[0].getsockname()
    with socket.create_connection(address) as stopped, socket.create_connection(address) as slow:
        for each in (stopped, slow):
            each.sendall(HEALTH)
        for _ in range(40):  # four times as long as a client may read nothing
            await asyncio.sleep(0.05)
            await asyncio.get_running_loop().run_in_executor(None, slow.recv, 1 << 20)
        assert len(state.connections) == 1
    listener.close()
    await asyncio.gather(*state.tasks, return_exceptions=True)


async def test_a_connection_without_a_request_is_closed_in_time(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


@pytest.mark.parametrize("extra", [b"", HEALTH[:-2]])
async def test_a_client_that_waits_for_an_answer_does_not_time_out(port: int, extra: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEALTH + extra)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(), 0.4)
    writer.close()


async def test_a_body_that_does_not_come_in_time_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.05)

    async def receive() -> dict[str, object]:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"{", "more_body": True}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(BodyTooSlow, match=r"within 0\.05 s") as caught:
        await read_body(request, BodyMemory(1 << 20))
    assert reply_to(caught.value).status == 408


async def test_large_bodies_beyond_what_is_held_are_a_503_and_others_are_read() -> None:
    memory, num_largest, largest = BodyMemory(1 << 20), 16, 1 << 20
    go_on = asyncio.Event()

    async def read(num_bytes: int) -> bytes:
        sent = iter([b'"' + b"a" * (num_bytes - 2), b'"'])

        async def receive() -> dict[str, object]:
            data = next(sent)
            if data == b'"':
                await go_on.wait()
            return {"type": "http.request", "body": data, "more_body": data != b'"'}

        request = Request({"type": "http", "method": "POST", "headers": []}, receive)
        return await read_body(request, memory)

    slow = [asyncio.create_task(read(largest)) for _ in range(2 * num_largest)]
    done, reading = await asyncio.wait(slow, timeout=0.2)
    errors = [task.exception() for task in done]
    assert errors and all(isinstance(error, TooManyLargeBodies) for error in errors)
    assert len(reading) >= num_largest
    reply = reply_to(errors[0] or AssertionError())
    assert reply.status == 503 and ("Retry-After", "2") in reply.headers
    ordinary = asyncio.create_task(read(100_000))
    go_on.set()
    assert len(await ordinary) == 100_000
    assert {len(body) for body in await asyncio.gather(*reading)} == {largest}
    assert len(await read(largest)) == largest  # what was taken is given back, by those refused too
