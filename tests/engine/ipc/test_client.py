"""The engine process through its asyncio face: a real process, a real socket, scripted tokens."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.errors import EngineFailed, QueueFull, RequestRefused
from penstock.engine.ipc.client import EngineClient
from penstock.engine.ipc.supervisor import EngineState
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import Request
from tests.support.paths import DEMO_MODEL
from tests.support.scheduling import make_request

# The scripted executor makes some ten thousand tokens a second: these are seconds of work.
LONG = 50_000


def config(**changes: object) -> EngineConfig:
    small = SchedulerConfig(max_num_seqs=4)
    settings: dict[str, object] = {
        "model": str(DEMO_MODEL),
        "scripted": True,
        "scheduler": small,
        "max_model_len": LONG + 100,
    }
    return EngineConfig(**(settings | changes))  # type: ignore[arg-type]


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    engine = EngineClient(config())
    with pytest.raises(EngineFailed, match="still loading"):
        _ = engine.info
    await engine.start()
    yield engine
    await engine.close()


async def read(client: EngineClient, request: Request) -> list[int]:
    return [
        token_id
        async for outputs in client.submit(request)
        for output in outputs
        for token_id in output.token_ids
    ]


async def until_idle(client: EngineClient) -> None:
    idle = asyncio.Event()
    client.on_step(lambda report: None if report.stats.num_running else idle.set())
    # Its report may have come before this was called.
    if client.last_report is None or client.last_report.stats.num_running:
        await asyncio.wait_for(idle.wait(), 60)


async def test_a_server_that_fell_behind_gets_many_steps_at_one_look(client: EngineClient) -> None:
    stream = client.submit(make_request("a", 5, max_tokens=100))
    sizes = [len(await anext(stream))]
    time.sleep(0.3)  # noqa: ASYNC251  # the event loop stands still, the engine does not
    sizes += [len(outputs) async for outputs in stream]
    assert sum(sizes) == 100 and max(sizes) > 10


async def test_concurrent_requests_get_the_tokens_that_they_get_alone(client: EngineClient) -> None:
    requests = [make_request(str(i), 5 + i, max_tokens=40) for i in range(12)]
    together = await asyncio.gather(*(read(client, request) for request in requests))
    for request, tokens in zip(requests, together, strict=True):
        assert await read(client, request) == tokens
        assert len(tokens) == 40


async def test_a_reader_that_fell_behind_gets_all_that_waits_in_one_item(
    client: EngineClient,
) -> None:
    stream = client.submit(make_request("a", 5, max_tokens=50))
    await until_idle(client)
    outputs = await anext(stream)
    assert len(outputs) == 50
    assert outputs[-1].finish is not None


async def test_a_cancelled_reader_aborts_its_request(client: EngineClient) -> None:
    task = asyncio.create_task(read(client, make_request("a", 5, max_tokens=LONG)))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until_idle(client)
    assert client.streams.num_open == 0
    assert client.last_report is not None
    assert client.last_report.stats.groups[0].num_used == 0


async def test_aborting_one_answer_lets_the_others_finish(client: EngineClient) -> None:
    request = make_request("a", 5, n=3, max_tokens=5000, temperature=1.0)
    stream = client.submit(request)
    client.streams.abort(request.id, 1)
    ended = [output.index async for outputs in stream for output in outputs if output.finish]
    assert sorted(ended) == [0, 2]


async def test_a_refused_request_raises_for_its_reader_alone(client: EngineClient) -> None:
    with pytest.raises(RequestRefused, match="90000 tokens"):
        await read(client, make_request("a", 90_000))
    assert len(await read(client, make_request("b", 5, max_tokens=3))) == 3


async def test_beyond_the_bounded_queue_a_request_is_refused_with_a_time_to_retry() -> None:
    engine = EngineClient(config(max_num_queued_reqs=2))
    await engine.start()
    for i in range(6):
        engine.submit(make_request(str(i), 5, max_tokens=LONG))
    with pytest.raises(QueueFull) as refusal:
        engine.submit(make_request("one too many", 5))
    assert refusal.value.retry_after_s >= 1
    await engine.close()


async def test_a_killed_engine_that_is_not_replaced_fails_every_open_request() -> None:
    engine = EngineClient(config(max_engine_restarts=0))
    await engine.start()
    task = asyncio.create_task(read(engine, make_request("a", 5, max_tokens=LONG)))
    await asyncio.sleep(0.05)
    assert engine.process.pid is not None
    os.kill(engine.process.pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match=r"code -9.* which dmesg shows: lower"):
        await task
    assert "code -9" in await engine.wait_dead()
    assert engine.state is EngineState.DEAD
    with pytest.raises(EngineFailed):
        engine.submit(make_request("b", 5))
    await engine.close()


async def test_a_folder_named_engine_where_it_is_started_is_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    engine = EngineClient(config())
    await engine.start()
    assert len(await read(engine, make_request("a", 5, max_tokens=3))) == 3
    await engine.close()


async def test_an_engine_that_cannot_start_reports_why() -> None:
    engine = EngineClient(config(model="/nowhere/at/all"))
    with pytest.raises(EngineFailed, match="nowhere"):
        await engine.start()
    await engine.close()


def test_the_engine_dies_with_a_parent_that_is_killed() -> None:
    program = (
        "import asyncio, sys\n"
        "from penstock.engine.ipc.client import EngineClient\n"
        "from penstock.engine.config import EngineConfig\n"
        "async def main():\n"
        "    client = EngineClient(EngineConfig(model=sys.argv[1], scripted=True))\n"
        "    await client.start()\n"
        "    print(client.process.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(DEMO_MODEL)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout
        engine_pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    for _ in range(6000):
        if not _is_alive(engine_pid):
            return
        time.sleep(0.01)
    raise AssertionError("the engine outlived its parent")


def _is_alive(pid: int) -> bool:
    """It exists, and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except OSError:
        return False
