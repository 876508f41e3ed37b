"""What a model with recurrent states has computed is found by the next engine: in memory that
outlives one, and in a directory."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.engine.config import EngineConfig, KVCacheDtype
from penstock.engine.memory import huge_pages
from penstock.engine.memory.pool.kv_memory import make_descriptor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import Request, RequestOutput
from tests.support.compiler import needs_compiler
from tests.support.parallel_answers import parallel_config, requests
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.tier_files import files_in
from tests.support.tiny_models import make_model, save

FAMILIES = ["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)]
NEW = (5, 6, 7)


@pytest.fixture(params=FAMILIES)
def config(request: pytest.FixtureRequest, tmp_path: Path) -> EngineConfig:
    path = save(make_model(request.param, max_position_embeddings=512), tmp_path / "model")
    return parallel_config(
        path, scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=23)
    )


def second_turns(first: list[Request], answers: list[list[RequestOutput]]) -> list[Request]:
    return [
        replace(turn, prompt_token_ids=(*turn.prompt_token_ids, *ids_of(answer), *NEW))
        for turn, answer in zip(first, answers, strict=True)
    ]


def check_second_engine(config: EngineConfig) -> None:
    """The second engine computes what is new, and answers to the last bit as one that has computed
    all."""
    first, turns = SteppedEngine(config), requests(40)[:3]
    answers = first.run(turns)
    if first.executor.tier is not None:
        first.executor.tier.flush()
    turns = second_turns(turns, answers)
    del first
    fresh = SteppedEngine(replace(config, kv_memory=None, kv_offload_dir=None))
    expected = fresh.run(turns)
    second = SteppedEngine(config)
    found = second.run(turns)
    for one, other in zip(expected, found, strict=True):
        assert ids_of(other) == ids_of(one)
        assert [o.logprobs for o in other] == [o.logprobs for o in one]
    hits = second.scheduler.stats().prefix_hit_tokens_total
    # Of each, all but the last block of 16 that the first turn has filled.
    assert hits >= sum(len(turn.prompt_token_ids) - len(NEW) - 16 for turn in turns)
    assert not fresh.scheduler.stats().prefix_hit_tokens_total


@needs_compiler
@pytest.mark.skipif(not huge_pages.are_possible(), reason="memory that is kept is on huge pages")
def test_in_memory_that_outlives_the_engine(config: EngineConfig) -> None:
    memory = make_descriptor()
    assert memory is not None
    try:
        check_second_engine(replace(config, kv_memory=memory))
    finally:
        os.close(memory)


@needs_compiler
@pytest.mark.parametrize("kind", [KVCacheDtype.AUTO, KVCacheDtype.INT8])
def test_in_a_directory(config: EngineConfig, kind: KVCacheDtype, tmp_path: Path) -> None:
    directory = tmp_path / "blocks"
    config = replace(config, kv_offload_dir=str(directory), kv_cache_dtype=kind)
    check_second_engine(config)
    assert {path.suffix for path in files_in(directory)} >= {".0", ".1"}
