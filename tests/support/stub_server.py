"""An HTTP server on raw sockets whose answers a test writes; it knows what it sent and when."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Exchange:
    """One request as the stub saw it, and the pen it answers with."""

    number: int
    connection: int
    body: dict[str, Any]
    writer: asyncio.StreamWriter
    sent_at_s: list[float] = field(default_factory=list)
    is_cut: bool = False

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, status: str = "200 OK", *headers: str) -> None:
        lines = [f"HTTP/1.1 {status}", *(headers or ("Transfer-Encoding: chunked",)), "", ""]
        await self.write("\r\n".join(lines).encode())

    async def chunk(self, data: bytes) -> None:
        await self.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, payload: Any) -> None:
        self.sent_at_s.append(time.perf_counter())
        await self.chunk(sse(payload))

    async def finish(self, num_tokens: int, num_prompt_tokens: int = 5) -> None:
        await self.chunk(sse(usage(num_tokens, num_prompt_tokens)) + b"data: [DONE]\n\n")
        await self.write(b"0\r\n\r\n")


def sse(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def token(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {
        "id": "cmpl-1",
        "choices": [{"index": 0, "text": text, "finish_reason": finish_reason}],
    }


def delta(finish_reason: str | None = None, **fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


def usage(num_tokens: int, num_prompt_tokens: int = 5) -> dict[str, Any]:
    counts = {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens}
    return {"choices": [], "usage": counts}


Behaviour = Callable[[Exchange], Awaitable[None]]


async def answer_five(exchange: Exchange) -> None:
    await exchange.head()
    for number in range(5):
        await exchange.event(token(f"t{number} "))
    await exchange.finish(5)


class Stub:
    """A server whose every answer is written by `behave`. It closes where `behave` closed."""

    def __init__(self, behave: Behaviour) -> None:
        self._behave = behave
        self.exchanges: list[Exchange] = []
        self.num_connections = 0
        self.num_loading_responses = 0  # how often GET /v1/models says 503 first
        self.num_unhealthy_responses = 0  # how often GET /health says 503 first
        self.models_status = "200 OK"
        self.max_model_len: int | None = None
        self.heads: list[bytes] = []  # of the exchanges
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = self.num_connections
        self.num_connections += 1
        with contextlib.suppress(
            asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError
        ):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET /v1/models "):
                    await self._list_models(writer)
                    continue
                if head.startswith(b"GET /health "):
                    await self._tell_health(writer)
                    continue
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                body = json.loads(await reader.readexactly(length))
                exchange = Exchange(len(self.exchanges), connection, body, writer)
                self.heads.append(head)
                self.exchanges.append(exchange)
                try:
                    await self._behave(exchange)
                except ConnectionError:
                    exchange.is_cut = True
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _list_models(self, writer: asyncio.StreamWriter) -> None:
        model = {"id": "stub", "max_model_len": self.max_model_len}
        status, body = self.models_status, json.dumps({"data": [model]}).encode()
        if self.num_loading_responses:
            self.num_loading_responses -= 1
            status, body = "503 Service Unavailable", b'{"error": {"message": "still loading"}}'
        await _answer(writer, status, body)

    async def _tell_health(self, writer: asyncio.StreamWriter) -> None:
        """A server without this path, but for the responses that a test has asked for."""
        if self.num_unhealthy_responses:
            self.num_unhealthy_responses -= 1
            body = b'{"error": {"message": "Loading model"}}'
            await _answer(writer, "503 Service Unavailable", body)
        else:
            await _answer(writer, "404 Not Found", b"")


async def _answer(writer: asyncio.StreamWriter, status: str, body: bytes) -> None:
    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()


@contextlib.contextmanager
def stub(behave: Behaviour) -> Iterator[Stub]:
    """A stub in a thread of its own, on a free port."""
    server, started, loop = Stub(behave), threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main_task() -> None:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        started.set()
        await stop.wait()
        listener.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(main_task()))
    thread.start()
    assert started.wait(5)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(5)
        loop.close()
