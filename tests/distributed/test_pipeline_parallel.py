"""Every family in two stages: logits within 1e-4 of one rank's in float32, and the same greedy
answers; and stages as processes, with signals."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from penstock.engine.errors import EngineFailed
from penstock.engine.ipc.supervisor import EndCause
from penstock.engine.loading import cpu
from tests.support.parallel_answers import assert_ranks_answer_alike, parallel_config
from tests.support.rank_processes import (
    REQUESTS,
    ids_of,
    is_running,
    rank_of,
    ranks_of,
    started,
    until_ended,
)
from tests.support.tiny_models import ALL_FAMILIES, make_model, save


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_two_stages_answer_as_one_for_200_tokens(family: str, tmp_path: Path) -> None:
    path = save(make_model(family, max_position_embeddings=512), tmp_path)
    assert_ranks_answer_alike(parallel_config(path), 1, 2)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_so_they_do_where_torch_computes_them(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "load_library", lambda *_, **__: None)
    path = save(make_model(family, max_position_embeddings=512), tmp_path)
    assert_ranks_answer_alike(parallel_config(path), 1, 2, num_tokens=60)


@pytest.mark.parametrize("family", ["llama3.2_tied", "olmo2", "gpt_oss", "gemma3", "qwen3_5_moe"])
def test_two_stages_of_two_ranks_answer_as_one(family: str, tmp_path: Path) -> None:
    path = save(make_model(family, max_position_embeddings=512), tmp_path)
    assert_ranks_answer_alike(parallel_config(path), 2, 2)


def test_four_stages_answer_as_one(tmp_path: Path) -> None:
    model = make_model("qwen3", max_position_embeddings=512, num_hidden_layers=5)
    assert_ranks_answer_alike(parallel_config(save(model, tmp_path)), 1, 4)


def test_a_stage_between_others_passes_on_what_inputs_of_layers_are_made_of(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    layer_types = [kinds[0], *kinds * 3]  # of which the last three share
    model = make_model(
        "gemma4_small_wrapped",
        max_position_embeddings=512,
        num_kv_shared_layers=3,
        layer_types=layer_types,
    )
    assert_ranks_answer_alike(parallel_config(save(model, tmp_path)), 2, 3, num_tokens=60)


async def test_stages_in_processes_have_the_very_answers_of_one_process() -> None:
    async with started() as client:
        alone = [await ids_of(client, request) for request in REQUESTS]
    async with started(pipeline_parallel_size=2) as client:
        asking = (ids_of(client, request) for request in REQUESTS)
        assert await asyncio.gather(*asking) == alone


async def test_of_four_ranks_in_two_stages_each_that_is_killed_is_replaced() -> None:
    async with started(tensor_parallel_size=2, pipeline_parallel_size=2) as client:
        alone = [await ids_of(client, request) for request in REQUESTS]
        for number in (0, 2):  # in rank 0's stage, and in the other
            engine, ranks = client.process.pid, ranks_of(client)
            assert engine is not None and len(ranks) == 3
            asking = asyncio.gather(*(ids_of(client, request) for request in REQUESTS))
            await asyncio.sleep(0.2)
            os.kill(ranks[number], signal.SIGKILL)
            assert await asking == alone
            await until_ended(engine, *ranks)
        assert client.restarts == {EndCause.KILLED: 2}


async def test_the_end_of_a_stage_is_one_sentence_of_who_and_where() -> None:
    async with started(pipeline_parallel_size=2, max_engine_restarts=0) as client:
        asking = asyncio.ensure_future(ids_of(client, REQUESTS[0]))
        await asyncio.sleep(0.2)
        rank = rank_of(client)
        os.kill(rank, signal.SIGKILL)
        killed_s = time.monotonic()
        async with asyncio.timeout(20):  # some ms, unless the machine is busy
            why = await client.wait_dead()
        with pytest.raises(EngineFailed):
            await asking
        assert time.monotonic() - killed_s < 20
        assert why.startswith("rank 1 (stage 0) was ended by signal 9") and "\n" not in why
        assert not is_running(rank)


async def test_a_stage_that_is_stopped_holds_nobody_up_for_five_seconds() -> None:
    async with started(pipeline_parallel_size=2, max_engine_restarts=0) as client:
        asking = asyncio.ensure_future(ids_of(client, REQUESTS[0]))
        await asyncio.sleep(0.2)
        os.kill(rank_of(client), signal.SIGSTOP)
        async with asyncio.timeout(20):  # 3 s, and what a busy machine adds
            why = await client.wait_dead()
        with pytest.raises(EngineFailed):
            await asking
        assert why.startswith("rank 1 (stage 0) was stopped, as SIGSTOP or a debugger does: ")
        assert "while rank 0 (stage 1) waited for it in step " in why
        assert ", waiting for stage 0 " in why


async def test_no_stage_is_left_when_its_engine_is_killed() -> None:
    async with started(pipeline_parallel_size=3, max_engine_restarts=0) as client:
        engine, ranks = client.process.pid, ranks_of(client)
        assert engine is not None and len(ranks) == 2
        os.kill(engine, signal.SIGKILL)
        await until_ended(engine, *ranks)
