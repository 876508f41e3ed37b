"""What an error in a step ends where the engine is not replaced: its process, its requests, and
then the server."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import httpx
import pytest

from penstock.engine.client import EngineClient, EngineFailed, EngineState, OutputStream
from penstock.engine.config import EngineConfig
from penstock.server.app import build_app
from penstock.server.config import ServeConfig, ServerConfig
from penstock.server.service import EXIT_ENGINE_DIED, Service, State
from tests.support.failing_engine import MESSAGE
from tests.support.paths import ROOT
from tests.support.scheduling import make_request
from tests.support.serving import MODEL

DEMO = ROOT / "engine" / "hub" / "demo_model"
CONFIG = EngineConfig(model=str(DEMO), scripted=True, max_engine_restarts=0)


@pytest.fixture(autouse=True)
def _finds_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    config = ServeConfig(server=ServerConfig(served_model_names=(MODEL,)), engine=CONFIG)
    service = Service(config, partial(EngineClient, module="tests.support.failing_engine"))
    running = asyncio.create_task(service.run())
    async with asyncio.timeout(120):
        while service.state is not State.READY:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    yield service
    await running


async def _read(stream: OutputStream) -> None:
    async for _ in stream:
        pass


async def test_a_step_that_fails_ends_the_process_with_its_cause_in_the_log(
    capfd: pytest.CaptureFixture[str],
) -> None:
    client = EngineClient(CONFIG, module="tests.support.failing_engine")
    await client.start()
    stream = client.submit(make_request("a", 5, max_tokens=100))
    with pytest.raises(EngineFailed, match=f"RuntimeError: {MESSAGE}$"):
        await asyncio.wait_for(_read(stream), 60)
    assert client.state is EngineState.DEAD
    process = client.process._process
    assert process is not None and await asyncio.wait_for(process.wait(), 60) == 1
    log = capfd.readouterr().err
    assert "Traceback" in log and "and how to debug that" in log
    assert "[a] engine: it ran in the step that failed" in log
    await client.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_step_that_fails_is_an_error_to_its_requests_and_ends_the_server(
    service: Service, stream: bool
) -> None:
    transport = httpx.ASGITransport(build_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        body = {"model": MODEL, "prompt": "Once", "max_tokens": 100, "stream": stream}
        async with asyncio.timeout(60):
            response = await http.post("/v1/completions", json=body)
    if stream:
        assert response.status_code == 200
        last = response.text.strip().split("\n\n")[-1]
        assert '"code":"engine_failed"' in last.replace(" ", "") and MESSAGE in response.text
    else:
        assert response.status_code == 500
        error = response.json()["error"]
        assert error["code"] == "engine_failed" and error["type"] == "server_error"
        assert MESSAGE in error["message"]
    assert await asyncio.wait_for(service.over, 60) == EXIT_ENGINE_DIED
