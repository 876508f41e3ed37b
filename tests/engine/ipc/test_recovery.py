"""Streams outlive engine processes: real processes, real signals, scripted tokens."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.config import EngineConfig
from penstock.engine.errors import EngineFailed, RequestEndedEngine
from penstock.engine.ipc.client import EngineClient
from penstock.engine.ipc.recovery import RestartBudget
from penstock.engine.ipc.supervisor import EndCause, EngineState
from penstock.engine.step.messages import StepReport
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import Request, RequestOutput
from tests.support.paths import DEMO_MODEL, ROOT
from tests.support.scheduling import make_request
from tests.support.troubled_engine import CRASHES, HANGS, LATE, RAISES

TROUBLED = "tests.support.troubled_engine"


def config(**changes: object) -> EngineConfig:
    settings: dict[str, object] = {
        "model": str(DEMO_MODEL),
        "scripted": True,
        "scheduler": SchedulerConfig(max_num_seqs=8),
        "max_model_len": 4096,
        "scripted_step_s": 0.003,
    }
    return EngineConfig(**(settings | changes))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _finds_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
async def engine() -> AsyncIterator[EngineClient]:
    client = EngineClient(config())
    await client.start()
    yield client
    await client.close()


async def outputs_of(client: EngineClient, request: Request) -> list[RequestOutput]:
    return [output async for outputs in client.submit(request) for output in outputs]


async def ids_of(client: EngineClient, request: Request) -> dict[int, list[int]]:
    ids: dict[int, list[int]] = {index: [] for index in range(request.n)}
    for output in await outputs_of(client, request):
        ids[output.index] += output.token_ids
    return ids


def kill_at(client: EngineClient, steps: set[int], number: int = signal.SIGKILL) -> None:
    """When it has reported this many steps, counted from now on."""
    num_steps = 0

    def on_step(report: StepReport) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps in steps and client.process.pid is not None:
            with suppress(ProcessLookupError):  # a report may come after its end
                os.kill(client.process.pid, number)

    client.on_step(on_step)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


REQUESTS = [
    make_request("greedy", 40, max_tokens=60),
    make_request("sampled", 9, max_tokens=50, temperature=1.0, seed=3, n=3),
    make_request("scored", 30, max_tokens=40, num_prompt_logprobs=2, num_logprobs=1),
    make_request("long", 200, max_tokens=30, temperature=1.0),
]


async def test_answers_go_on_in_another_process_where_they_stopped(engine: EngineClient) -> None:
    alone = [await ids_of(engine, request) for request in REQUESTS]
    kill_at(engine, {5, 30})
    assert await asyncio.gather(*(ids_of(engine, r) for r in REQUESTS)) == alone
    await until(lambda: engine.restarts[EndCause.KILLED] == 2)
    await until(lambda: engine.state is EngineState.READY)
    assert engine.streams.num_open == 0 and engine.recovery.num_quarantined == 0
    assert 1 <= engine.recovery.num_resumed <= 2 * len(REQUESTS)


async def test_what_was_returned_is_not_returned_again(engine: EngineClient) -> None:
    request = make_request("a", 30, max_tokens=20, num_prompt_logprobs=0)
    kill_at(engine, {8})
    outputs = await outputs_of(engine, request)
    assert sum(output.prompt is not None for output in outputs) == 1
    assert sum(len(output.token_ids) for output in outputs) == 20
    assert sum(output.finish is not None for output in outputs) == 1


async def test_a_request_that_comes_while_the_engine_restarts_waits(engine: EngineClient) -> None:
    assert engine.process.pid is not None
    os.kill(engine.process.pid, signal.SIGKILL)
    await until(lambda: engine.state is EngineState.RESTARTING)
    assert engine.ready_in_s >= 1
    assert len((await ids_of(engine, make_request("a", 5, max_tokens=7)))[0]) == 7


async def test_an_answer_that_is_aborted_meanwhile_does_not_come_back(engine: EngineClient) -> None:
    request = make_request("a", 5, n=2, max_tokens=400, temperature=1.0)
    stream = engine.submit(request)
    await anext(stream)
    assert engine.process.pid is not None
    os.kill(engine.process.pid, signal.SIGKILL)
    await until(lambda: engine.state is EngineState.RESTARTING)
    engine.streams.abort(request.id, 0)
    rest = [output async for outputs in stream for output in outputs]
    assert {output.index for output in rest if output.finish} == {1}


@pytest.mark.parametrize("is_out_of_memory", [False, True])
async def test_the_memory_of_keys_and_values_is_kept_unless_it_was_too_much(
    engine: EngineClient, monkeypatch: pytest.MonkeyPatch, is_out_of_memory: bool
) -> None:
    def inode() -> int:
        assert engine._kv_memory is not None
        return os.fstat(engine._kv_memory).st_ino

    before = inode()
    if is_out_of_memory:
        monkeypatch.setattr("penstock.engine.ipc.supervisor._num_oom_kills", lambda: 1 << 60)
    alone = await ids_of(engine, REQUESTS[3])
    kill_at(engine, {5})
    assert await ids_of(engine, REQUESTS[3]) == alone
    assert (inode() != before) == is_out_of_memory
    assert engine.last_report
    # Of 200 tokens and what was added, a block, or everything.
    assert (engine.last_report.stats.recomputed_tokens_total > 100) == is_out_of_memory
    descriptor = engine._kv_memory
    await engine.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor or -1)


@pytest.mark.slow
async def test_a_stopped_process_is_replaced_and_nobody_is_suspected() -> None:
    client = EngineClient(config(stall_timeout_s=3.0))
    await client.start()
    alone = await ids_of(client, REQUESTS[0])
    kill_at(client, {5}, signal.SIGSTOP)
    assert await asyncio.wait_for(ids_of(client, REQUESTS[0]), 60) == alone
    assert client.restarts[EndCause.STOPPED] == 1 and client.recovery.num_quarantined == 0
    await client.close()


@pytest.mark.parametrize(
    ("poison", "cause"),
    [
        (RAISES, EndCause.FAILED),
        (CRASHES, EndCause.FAILED),
        pytest.param(HANGS, EndCause.STALLED, marks=pytest.mark.slow),
    ],
)
async def test_the_request_that_ends_the_engine_twice_fails_and_all_others_go_on(
    poison: int, cause: EndCause
) -> None:
    stall_timeout_s = 3.0 if cause is EndCause.STALLED else 60.0
    client = EngineClient(config(stall_timeout_s=stall_timeout_s), module=TROUBLED)
    await client.start()
    alone = [await ids_of(client, request) for request in REQUESTS]
    others = [asyncio.create_task(ids_of(client, request)) for request in REQUESTS]
    guilty = make_request("guilty", [7, 8, poison], max_tokens=20)
    with pytest.raises(RequestEndedEngine, match="twice"):
        await asyncio.wait_for(outputs_of(client, guilty), 120)
    assert await asyncio.gather(*others) == alone
    assert client.recovery.num_quarantined == 1 and client.restarts[cause] == 2
    await client.close()


async def test_one_that_ends_it_in_a_step_of_many_drafts_is_found_by_one_trial(
    engine: EngineClient,
) -> None:
    """The trial runs as many tokens as the steps that the server has not heard of may have had."""
    guilty = make_request("guilty", [7, 8, LATE], max_tokens=60)
    answer = (await ids_of(engine, guilty))[0]
    client = EngineClient(config(), module="tests.support.drafting_engine")
    await client.start()
    with pytest.raises(RequestEndedEngine, match="twice"):
        await outputs_of(client, replace(guilty, prediction=tuple(answer)))
    await until(lambda: client.restarts[EndCause.FAILED] == 2)
    await until(lambda: client.state is EngineState.READY)
    assert client.recovery.num_quarantined == 1 and client.restarts.total() == 2
    await client.close()


async def test_a_kill_during_the_trials_blames_nobody() -> None:
    client = EngineClient(config(), module=TROUBLED)
    await client.start()
    alone = await ids_of(client, REQUESTS[0])
    other = asyncio.create_task(ids_of(client, REQUESTS[0]))
    killed = False

    def on_step(report: StepReport) -> None:
        nonlocal killed
        if client.restarts[EndCause.FAILED] == 1 and not killed and client.process.pid is not None:
            killed = True
            os.kill(client.process.pid, signal.SIGKILL)

    client.on_step(on_step)
    guilty = make_request("guilty", [7, 8, RAISES], max_tokens=20)
    with pytest.raises(RequestEndedEngine):
        await asyncio.wait_for(outputs_of(client, guilty), 120)
    assert await other == alone
    assert client.recovery.num_quarantined == 1
    await client.close()


async def test_a_crash_loop_ends_with_one_sentence_that_names_the_flag() -> None:
    client = EngineClient(config(max_engine_restarts=2))
    await client.start()
    kill_at(client, set(range(1, 100)))
    with pytest.raises(EngineFailed, match=r"replaced 2 times.*--max-engine-restarts"):
        await asyncio.wait_for(outputs_of(client, make_request("a", 5, max_tokens=4000)), 120)
    assert "--max-engine-restarts" in await client.wait_dead()
    assert client.state is EngineState.DEAD
    await client.close()


async def test_a_client_that_is_closed_while_it_restarts_leaves_nothing() -> None:
    client = EngineClient(config())
    await client.start()
    assert client.process.pid is not None
    os.kill(client.process.pid, signal.SIGKILL)
    await until(lambda: client.state is EngineState.RESTARTING)
    stream = client.submit(make_request("a", 5))
    await until(lambda: client.process.pid is not None)
    await client.close()
    with pytest.raises(EngineFailed, match="shutting down"):
        await anext(stream)
    assert client.process.pid is None


@given(
    gaps_s=st.lists(st.floats(0, 400), max_size=40),
    max_restarts=st.integers(0, 5),
    has_worked=st.booleans(),
)
def test_no_ten_minutes_have_more_restarts_than_the_budget(
    gaps_s: list[float], max_restarts: int, has_worked: bool
) -> None:
    budget, now_s = RestartBudget(max_restarts), 0.0
    granted: list[float] = []
    for gap_s in gaps_s:
        now_s += gap_s
        delay_s = budget.delay_s(now_s, has_worked=has_worked)
        recent = [at_s for at_s in granted if at_s > now_s - 600]
        assert (delay_s is None) == (len(recent) >= max_restarts)
        if delay_s is not None:
            granted.append(now_s)
            assert 0 <= delay_s <= 30 and not (has_worked and delay_s)


def test_the_pause_doubles_while_engines_end_without_a_token() -> None:
    budget = RestartBudget(100)
    delays = [budget.delay_s(0.0, has_worked=False) for _ in range(8)]
    assert delays == [0, 1, 2, 4, 8, 16, 30, 30]
    assert budget.delay_s(0.0, has_worked=True) == 0
