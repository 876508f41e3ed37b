"""The processes of ranks end with the engine, and the engine with them: real processes, real
signals, the demo model."""

import asyncio
import os
import signal
import time
from dataclasses import replace
from functools import partial

import httpx
import pytest

from penstock.engine.config import SpeculativeConfig
from penstock.engine.errors import EngineFailed
from penstock.engine.ipc.client import EngineClient
from penstock.engine.ipc.supervisor import EndCause, EngineState
from tests.support.compiler import needs_compiler
from tests.support.rank_processes import (
    REQUESTS,
    children,
    config,
    ids_of,
    rank_of,
    until_ended,
)
from tests.support.rank_processes import started as started_with
from tests.support.serving import RunningServer

pytestmark = needs_compiler
started = partial(started_with, tensor_parallel_size=2)


@pytest.mark.slow
async def test_a_rank_that_is_killed_is_replaced_and_streams_go_on() -> None:
    async with started() as client:
        alone = [await ids_of(client, request) for request in REQUESTS]
        engine, rank = client.process.pid, rank_of(client)
        assert engine is not None
        ended_s: list[float] = []
        client.on_restart(lambda: ended_s.append(time.monotonic()))
        asking = asyncio.gather(*(ids_of(client, request) for request in REQUESTS))
        await asyncio.sleep(0.1)
        os.kill(rank, signal.SIGKILL)
        killed_s = time.monotonic()
        assert await asking == alone
        assert len(ended_s) == 1
        assert ended_s[0] - killed_s < 20  # some ms, unless the machine is busy
        assert client.restarts == {EndCause.KILLED: 1}
        await until_ended(engine, rank)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
async def test_so_do_streams_whose_tokens_are_drafted(sizes: tuple[int, int]) -> None:
    tensor_size, num_stages = sizes
    requests = [replace(each, prompt_token_ids=(5, 6, 7, 8, 9) * 8) for each in REQUESTS]
    none = SpeculativeConfig(num_speculative_tokens=0)
    async with started(tensor_parallel_size=tensor_size, speculative=none) as client:
        plain = [await ids_of(client, request) for request in requests]
    async with started(
        tensor_parallel_size=tensor_size, pipeline_parallel_size=num_stages
    ) as client:
        assert [await ids_of(client, request) for request in requests] == plain
        asking = asyncio.gather(*(ids_of(client, request) for request in requests))
        await asyncio.sleep(0.1)
        os.kill(rank_of(client), signal.SIGKILL)
        assert await asking == plain
        assert client.restarts == {EndCause.KILLED: 1}
        assert client.last_report is not None
        drafts = client.last_report.stats.drafts
        assert sum(each.num_accepted_tokens for each in drafts) > 20


async def test_the_end_of_a_rank_is_one_sentence_even_while_nothing_runs() -> None:
    async with started(max_engine_restarts=0) as client:
        os.kill(rank_of(client), signal.SIGKILL)
        async with asyncio.timeout(20):
            why = await client.wait_dead()
        assert why.startswith("rank 1 was ended by signal 9") and "\n" not in why


@pytest.mark.slow
async def test_a_rank_that_is_stopped_holds_nobody_up_for_five_seconds() -> None:
    async with started(max_engine_restarts=0) as client:
        asking = asyncio.ensure_future(ids_of(client, REQUESTS[0]))
        await asyncio.sleep(0.05)
        os.kill(rank_of(client), signal.SIGSTOP)
        async with asyncio.timeout(20):  # 3 s, and what a busy machine adds
            why = await client.wait_dead()
        with pytest.raises(EngineFailed):
            await asking
        assert why.startswith("rank 1 was stopped, as SIGSTOP or a debugger does: ")
        assert "while rank 0 waited for it in step " in why


@pytest.mark.slow
async def test_no_rank_is_left_when_its_engine_is_killed() -> None:
    async with started() as client:
        engine, rank = client.process.pid, rank_of(client)
        assert engine is not None
        has_noticed = asyncio.Event()
        client.on_restart(has_noticed.set)
        os.kill(engine, signal.SIGKILL)
        await until_ended(engine, rank)
        async with asyncio.timeout(120):
            await has_noticed.wait()
            while client.state is not EngineState.READY:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert rank_of(client) != rank


async def test_a_rank_that_cannot_start_says_why() -> None:
    client = EngineClient(config(model="/no/such/model", tensor_parallel_size=2))
    with pytest.raises(EngineFailed, match="/no/such/model"):
        await client.start()
    await client.close()


@pytest.mark.slow
def test_no_process_is_left_when_the_server_is_killed() -> None:
    flags = ("--device", "cpu", "--kv-cache-memory-bytes", "16M", "-tp", "2")
    server = RunningServer(*flags)
    try:
        server.wait_until_ready()
        assert server.get("/version").json()["tensor_parallel_size"] == 2
        body = {"model": "penstock-demo", "prompt": "Once", "max_tokens": 8, "temperature": 0}
        assert server.post("/v1/completions", body).json()["choices"][0]["text"]
        engine = next(pid for pid in children(server.process.pid) if children(pid))
        pids = [engine, *children(engine)]
        assert len(pids) == 2
        server.process.kill()
        asyncio.run(until_ended(*pids))
        with pytest.raises(httpx.TransportError):
            server.get("/health")
    finally:
        server.stop()
