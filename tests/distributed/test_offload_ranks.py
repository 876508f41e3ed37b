"""`--kv-offload-dir` over several ranks: a block of all of them is one file, which the next ranks
read."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.engine.config import EngineConfig
from penstock.scheduler.stats import PlaceStats
from penstock.scheduler.types import RequestOutput
from tests.support.executors import cpu_executor
from tests.support.parallel_answers import assert_close, parallel_config, rank_bytes, requests
from tests.support.rank_processes import ids_of, rank_of, started, until_ended
from tests.support.rank_threads import RankThreads, memberships
from tests.support.scheduling import make_request
from tests.support.stepping import SteppedEngine
from tests.support.tier_files import DAMAGES, damage, files_in
from tests.support.tiny_models import make_model, save

NUM_TOKENS = 40


def answers(config: EngineConfig) -> tuple[list[list[RequestOutput]], PlaceStats]:
    """Of new ranks, and what their tier did."""
    ranks = RankThreads(config, memberships(config))
    try:
        # Fewer blocks than the sequences need, so that what is read takes the place of others.
        engine = SteppedEngine(config, ranks, num_blocks=24)
        found = engine.run(requests(NUM_TOKENS))
        assert ranks.tier is not None
        ranks.tier.flush()
        disk = ranks.tier.stats().disk
        assert disk is not None
        return found, disk
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("family", "tensor_size", "num_stages"),
    [
        ("qwen3", 2, 1),
        ("qwen3", 1, 2),
        ("gemma3", 2, 2),  # groups of blocks, of which a stage has some alone
        ("llama3.2_tied", 4, 1),  # fewer key and value heads than ranks
        ("gemma4_small_wrapped", 1, 2),
        ("youtu", 2, 1),  # whose ranks all have the same
        ("qwen3_5", 2, 1),  # recurrent states, of which each has those of its heads
        ("qwen3_5_moe", 1, 4),  # or of its layers, which one stage has none of
    ],
)
def test_what_ranks_wrote_the_next_ones_read_and_damage_is_computed_again(
    family: str, tensor_size: int, num_stages: int, tmp_path: Path
) -> None:
    path = save(make_model(family, max_position_embeddings=512), tmp_path / "model")
    config = parallel_config(path)
    expected = SteppedEngine(config, cpu_executor(config, path)).run(requests(NUM_TOKENS))
    config = replace(
        config,
        tensor_parallel_size=tensor_size,
        pipeline_parallel_size=num_stages,
        kv_offload_dir=str(tmp_path / "blocks"),
    )
    config = replace(config, kv_cache_memory_bytes=rank_bytes(config))
    first, written = answers(config)
    again, read = answers(config)
    assert written.num_blocks and read.hit_blocks_total and not read.damaged_blocks_total
    for number, file in enumerate(files_in(tmp_path / "blocks")):
        damage(file, DAMAGES[number % len(DAMAGES)], number)
    once_more, after_damage = answers(config)
    assert after_damage.damaged_blocks_total
    for given in (first, again, once_more):
        for one, other in zip(expected, given, strict=True):
            assert_close(one, other)


async def test_after_a_rank_was_killed_a_prompt_comes_from_the_disk(tmp_path: Path) -> None:
    # To compute it takes far longer than to read it.
    model = make_model(
        "qwen3", hidden_size=512, intermediate_size=2048, max_position_embeddings=1024
    )
    path = save(model, tmp_path / "model")
    prompt = tuple(3 + i * i % 90 for i in range(900))
    request = replace(make_request("a", 1, max_tokens=8, temperature=0.0), prompt_token_ids=prompt)
    offload = str(tmp_path / "blocks")
    async with started(model=str(path), tensor_parallel_size=2, kv_offload_dir=offload) as client:
        before = await ids_of(client, request)
        async with asyncio.timeout(30):
            while len(files_in(tmp_path / "blocks")) < 900 // 16:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        engine, rank = client.process.pid, rank_of(client)
        os.kill(rank, signal.SIGKILL)
        assert engine is not None
        await until_ended(engine, rank)
        assert await ids_of(client, request) == before
        assert client.last_report is not None
        tier = client.last_report.stats.tier
        assert tier is not None and tier.hit_tokens_total == 900 // 16 * 16
