"""A client that asks for a stream and is slow to read it: what it costs the server and the others.

The app is called as an ASGI server calls it, with a `send` that waits as one with a full socket.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from itertools import chain
from typing import Any

import pytest
from fastapi import FastAPI

from penstock.engine.config import EngineConfig
from penstock.server.app import build_app
from penstock.server.config import ServeConfig, ServerConfig
from penstock.server.service import Service, State
from tests.support.paths import DEMO_MODEL
from tests.support.serving import MODEL

NUM_TOKENS = 10_000


@pytest.fixture
async def app() -> AsyncIterator[FastAPI]:
    engine = EngineConfig(model=str(DEMO_MODEL), scripted=True, max_model_len=NUM_TOKENS + 100)
    server = ServerConfig(served_model_names=(MODEL,))
    service = Service(ServeConfig(server=server, engine=engine))
    running = asyncio.create_task(service.run())
    await until(lambda: service.state is State.READY)
    yield build_app(service)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await service.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Stream:
    """One streamed answer. While `is_reading` is not set, its second body does not get out."""

    def __init__(self, app: FastAPI) -> None:
        fields = {"model": MODEL, "prompt": "Once", "seed": 1, "max_tokens": NUM_TOKENS}
        extras = {"stream": True, "ignore_eos": True, "return_token_ids": True}
        body = json.dumps(fields | extras).encode()
        self._requests = [{"type": "http.request", "body": body, "more_body": False}]
        self.bodies: list[bytes] = []
        self.is_reading = asyncio.Event()
        self.has_left = asyncio.Event()
        self.service: Service = app.state.service
        headers = [(b"content-type", b"application/json")]
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": headers,
        }
        scope |= {"query_string": b"", "root_path": "", "http_version": "1.1", "scheme": "http"}
        self.answered = asyncio.ensure_future(app(scope, self._receive, self._send))

    @property
    def num_generated(self) -> int:
        return self.service.metrics.generated_tokens

    def token_ids(self) -> list[list[int]]:
        """Of each event that has any."""
        events = b"".join(self.bodies).decode().split("\n\n")
        chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
        return [ids for chunk in chunks if (ids := chunk["choices"][0].get("token_ids"))]

    async def _receive(self) -> Any:
        if self._requests:
            return self._requests.pop()
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if len(self.bodies) == 1:
            await self.is_reading.wait()
        if "body" in message:
            self.bodies.append(message["body"])


async def test_a_reader_that_resumes_gets_all_that_waited_in_bounded_events(app: FastAPI) -> None:
    slow, quick = Stream(app), Stream(app)
    quick.is_reading.set()
    await asyncio.wait_for(quick.answered, 60)  # it does not wait for the other
    await until(lambda: slow.num_generated == 2 * NUM_TOKENS)
    assert len(slow.bodies) == 1
    slow.is_reading.set()
    await asyncio.wait_for(slow.answered, 60)
    assert slow.bodies[-1].endswith(b"data: [DONE]\n\n")
    sizes = [len(ids) for ids in slow.token_ids()]
    # As the engine's outputs, each with all that is said of it, no more than these have waited.
    assert 1000 < max(sizes) < 2000
    assert list(chain(*slow.token_ids())) == list(chain(*quick.token_ids()))


async def test_a_slow_reader_that_disconnects_frees_everything(app: FastAPI) -> None:
    stream = Stream(app)
    await until(lambda: stream.num_generated > 2000)
    stream.has_left.set()
    await asyncio.wait_for(stream.answered, 10)
    await until(lambda: b"penstock_running_sequences 0.0" in stream.service.metrics.text())
    assert stream.num_generated < NUM_TOKENS
    assert len(stream.bodies) == 1
