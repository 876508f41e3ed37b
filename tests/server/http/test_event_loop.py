"""What is long to write is written in a thread: the event loop serves the others meanwhile."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from penstock.engine.config import EngineConfig
from penstock.server.api.openai.completion_writer import CompletionWriter
from penstock.server.app import build_app
from penstock.server.config import ServeConfig, ServerConfig
from penstock.server.service import Service, State
from tests.support.paths import ROOT
from tests.support.serving import MODEL

DEMO = ROOT / "engine" / "hub" / "demo_model"


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    engine = EngineConfig(model=str(DEMO), scripted=True)
    service = Service(ServeConfig(server=ServerConfig(served_model_names=(MODEL,)), engine=engine))
    running = asyncio.create_task(service.run())
    async with asyncio.timeout(30):
        while service.state is not State.READY:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    transport = httpx.ASGITransport(build_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await service.close()


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Who wrote logprobs, of each time."""
    threads: list[threading.Thread] = []
    write = CompletionWriter._logprobs

    def logprobs(*arguments: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return write(*arguments)

    monkeypatch.setattr(CompletionWriter, "_logprobs", logprobs)
    return threads


async def complete(client: httpx.AsyncClient, **fields: Any) -> str:
    body = {"model": MODEL, "prompt": "Once", "seed": 1, "logprobs": 1} | fields
    response = await client.post("/v1/completions", json=body, timeout=30)
    assert response.status_code == 200
    return response.text


async def test_logprobs_of_many_tokens_are_written_in_a_thread(
    client: httpx.AsyncClient, writers: list[threading.Thread]
) -> None:
    echo = {"echo": True, "max_tokens": 0, "prompt": [65] * 1500}
    for fields in (echo, echo | {"stream": True}, {"max_tokens": 1500, "ignore_eos": True}):
        writers.clear()
        assert '"token_logprobs":[' in await complete(client, **fields)
        assert writers and threading.main_thread() not in writers


async def test_what_follows_an_echo_in_a_stream_comes_in_order(
    client: httpx.AsyncClient,
) -> None:
    fields = {"echo": True, "max_tokens": 50, "stream": True, "ignore_eos": True}
    text = await complete(client, prompt=[65] * 500, **fields)
    assert text.endswith("data: [DONE]\n\n")
    assert text.index("[null,") < text.index('"finish_reason":"length"') < text.index("[DONE]")
