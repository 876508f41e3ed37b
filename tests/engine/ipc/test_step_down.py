"""The server starts the engine again in a slower way where a GPU has failed: real processes, whose
GPU is made up."""

import asyncio
import json
from collections.abc import Callable

import pytest

from penstock.engine.config import EngineConfig, GpuWay
from penstock.engine.errors import EngineFailed
from penstock.engine.ipc.client import EngineClient
from penstock.engine.ipc.supervisor import EndCause, EngineState
from tests.support.faulty_gpu_engine import FAULTS
from tests.support.paths import DEMO_MODEL, ROOT
from tests.support.scheduling import make_request

Start = Callable[..., EngineClient]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Start:
    """An engine with these faults: by a way, what fails in it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def make(faults: dict[str, str], **changes: object) -> EngineClient:
        monkeypatch.setenv(FAULTS, json.dumps(faults))
        config = EngineConfig(model=str(DEMO_MODEL), scripted=True, **changes)  # type: ignore[arg-type]
        return EngineClient(config, module="tests.support.faulty_gpu_engine")

    return make


async def ids_of(engine: EngineClient, num_tokens: int) -> list[int]:
    request = make_request("a", 5, max_tokens=num_tokens)
    outputs = [output async for each in engine.submit(request) for output in each]
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("restarts", [0, 10])
async def test_a_start_steps_down_until_a_way_works_and_says_why(
    client: Start, restarts: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = client({"pdl": "start", "graphs": "hang"}, max_engine_restarts=restarts)
    info = await asyncio.wait_for(engine.start(), 60)
    assert info.gpu_way is GpuWay.EAGER
    assert list(engine.failed_ways) == [GpuWay.PDL, GpuWay.GRAPHS]
    assert engine.failed_ways[GpuWay.PDL] == "it computes something else"
    assert "did not finish a small step" in engine.failed_ways[GpuWay.GRAPHS]
    assert "with --gpu-way pdl: it computes something else; the engine starts" in caplog.text
    assert "starts again with --gpu-way eager, which is slower" in caplog.text
    assert not engine.restarts  # nothing that ran was lost
    assert len(await ids_of(engine, 5)) == 5
    await engine.close()


async def test_a_start_fails_where_the_last_way_does(client: Start) -> None:
    engine = client(dict.fromkeys(GpuWay, "start"), gpu_way=GpuWay.EAGER)
    with pytest.raises(EngineFailed, match="computes something else"):
        await asyncio.wait_for(engine.start(), 60)
    assert engine.state is EngineState.DEAD and list(engine.failed_ways) == [GpuWay.EAGER]
    await engine.close()


@pytest.mark.parametrize(
    ("fault", "cause", "why"),
    [
        ("step", EndCause.FAILED, "CUDA error: an illegal memory access was encountered"),
        pytest.param("stall", EndCause.STALLED, "did nothing for", marks=pytest.mark.slow),
    ],
)
async def test_after_a_fault_while_it_serves_it_goes_on_in_a_slower_way(
    client: Start, fault: str, cause: EndCause, why: str
) -> None:
    engine = client({"pdl": fault}, stall_timeout_s=3.0)
    await engine.start()
    assert len(await asyncio.wait_for(ids_of(engine, 20), 60)) == 20
    assert engine.info.gpu_way is GpuWay.GRAPHS
    assert list(engine.failed_ways) == [GpuWay.PDL]
    assert why in engine.failed_ways[GpuWay.PDL]
    assert engine.restarts == {cause: 1}
    await engine.close()


def test_several_gpus_have_no_way_without_our_kernels() -> None:
    two = EngineConfig(model="m", tensor_parallel_size=2)
    assert two.slower_way(GpuWay.GRAPHS) is GpuWay.EAGER and two.slower_way(GpuWay.EAGER) is None
    assert EngineConfig(model="m").slower_way(GpuWay.EAGER) is GpuWay.TORCH
