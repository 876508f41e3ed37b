"""What an operator sees of a GPU on which ways have failed."""

import asyncio
import json
from functools import partial

import httpx
import pytest

from penstock.engine.client import EngineClient
from penstock.engine.config import EngineConfig
from penstock.server.app import build_app
from penstock.server.config import ServeConfig, ServerConfig
from penstock.server.service import Service, State
from tests.support.faulty_gpu_engine import FAULTS
from tests.support.paths import DEMO_MODEL, ROOT
from tests.support.serving import MODEL


async def test_version_and_a_metric_tell_the_way_and_why_others_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(FAULTS, json.dumps({"pdl": "start", "graphs": "step"}))
    config = ServeConfig(
        server=ServerConfig(served_model_names=(MODEL,)),
        engine=EngineConfig(model=str(DEMO_MODEL), scripted=True),
    )
    service = Service(config, partial(EngineClient, module="tests.support.faulty_gpu_engine"))
    running = asyncio.create_task(service.run())
    transport = httpx.ASGITransport(build_app(service))
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
        asyncio.timeout(60),
    ):
        assert (await http.get("/version")).json()["gpu_way"] is None
        while service.state is not State.READY:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        metric = 'penstock_gpu_way_info{failed="pdl",way="graphs"} 1.0'
        assert metric in (await http.get("/metrics")).text
        body = {"model": MODEL, "prompt": "Once", "max_tokens": 20}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        version = (await http.get("/version")).json()
        assert version["gpu_way"] == "eager"
        assert version["failed_gpu_ways"]["pdl"] == "it computes something else"
        assert "illegal memory access" in version["failed_gpu_ways"]["graphs"]
        metric = 'penstock_gpu_way_info{failed="pdl,graphs",way="eager"} 1.0'
        assert metric in (await http.get("/metrics")).text
    await service.close()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
