"""Layers with recurrent states on several ranks: states, their copies and snapshots are the same
for all. `tests/distributed` has all families, with answers of 200 tokens."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.step.executor import PendingTokens
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.types import RequestId, RequestOutput
from tests.support.compiler import needs_compiler
from tests.support.parallel_answers import (
    assert_close,
    assert_ranks_answer_alike,
    parallel_config,
    requests,
)
from tests.support.rank_threads import RankThreads, memberships
from tests.support.scheduling import make_request
from tests.support.stepping import SteppedEngine, ids_of
from tests.support.tiny_models import make_model, save

pytestmark = needs_compiler
# Tensor parallel, and stages: of which of four, with four layers, no one has both kinds.
SIZES = [(2, 1), (1, 2), (1, 4), (2, 2)]


def config_of(path: Path, family: str = "qwen3_5", **options: Any) -> EngineConfig:
    """Chunks end within a block."""
    save(make_model(family, max_position_embeddings=512, **options), path)
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=23)
    return parallel_config(path, scheduler=scheduler)


@contextmanager
def ranks_of(config: EngineConfig, tensor_size: int, num_stages: int) -> Iterator[RankThreads]:
    config = replace(config, tensor_parallel_size=tensor_size, pipeline_parallel_size=num_stages)
    ranks = RankThreads(config, memberships(config))
    try:
        yield ranks
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("qwen3_5", (2, 1), {}),
        ("qwen3_5_moe", (2, 1), {}),
        # Of two heads of keys, two ranks have the same one.
        ("qwen3_5", (4, 1), {"linear_num_value_heads": 4}),
        ("qwen3_5", (1, 4), {}),
        ("qwen3_5_moe", (2, 2), {}),
    ],
)
def test_ranks_answer_as_one(
    family: str, sizes: tuple[int, int], options: dict[str, Any], tmp_path: Path
) -> None:
    assert_ranks_answer_alike(config_of(tmp_path, family, **options), *sizes, num_tokens=30)


def test_a_rank_has_the_states_of_its_own_heads_and_layers(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    whole = SteppedEngine(config).executor.info
    with ranks_of(config, 2, 1) as ranks:
        assert 2 * ranks.info.state_bytes == whole.state_bytes
        assert ranks.info.flops_per_token * 2 == whole.flops_per_token
    with ranks_of(config, 1, 4) as ranks:
        infos = [rank.info for rank in ranks.ranks]
    # Rank 0 has the last layer, with attention.
    assert [3 * info.state_bytes for info in infos] == [0, *[whole.state_bytes] * 3]
    assert len({info.kv_groups for info in infos}) == 1 and infos[0].num_states > 1


def test_several_ranks_have_no_drafts_where_a_tier_may_move_a_state_before_it_has_gone_on(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path / "model")
    with_tier = replace(config, kv_offload_dir=str(tmp_path / "blocks"))
    assert SteppedEngine(with_tier).executor.info.takes_drafts
    for each, takes_drafts in ((config, True), (with_tier, False)):
        with ranks_of(each, 2, 1) as ranks:
            assert ranks.info.takes_drafts is takes_drafts


@pytest.mark.parametrize("sizes", SIZES)
def test_a_second_turn_goes_on_from_a_snapshot_on_all_of_them(
    sizes: tuple[int, int], tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    first = requests(40)[:3]

    def second_turns(answers: list[list[RequestOutput]]) -> list[Any]:
        new = (5, 6, 7)
        return [
            replace(turn, prompt_token_ids=(*turn.prompt_token_ids, *ids_of(answer), *new))
            for turn, answer in zip(first, answers, strict=True)
        ]

    alone = SteppedEngine(config)
    turns = second_turns(alone.run(first))
    expected = SteppedEngine(config).run(turns)  # nothing is cached there
    with ranks_of(config, *sizes) as ranks:
        engine = SteppedEngine(config, ranks)
        answers = engine.run(first)
        assert second_turns(answers) == turns
        before = engine.scheduler.stats().prefix_hit_tokens_total
        for one, other in zip(expected, engine.run(turns), strict=True):
            assert_close(one, other)
        found = engine.scheduler.stats().prefix_hit_tokens_total - before
    # Of each, all but the last block of 16 that the first turn has filled, or less.
    assert found >= sum(len(turn.prompt_token_ids) - 3 - 32 for turn in turns)


@pytest.mark.parametrize(
    ("num_steps", "sizes"), [(1, (2, 1)), (6, (1, 2)), (1, (1, 4)), (6, (2, 2))]
)
def test_an_aborted_sequence_leaves_nothing_in_the_state_that_the_next_one_gets(
    num_steps: int, sizes: tuple[int, int], tmp_path: Path
) -> None:
    """num_steps: before it is aborted, in the midst of its prompt or of its answer."""
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=23)
    config = replace(config_of(tmp_path), scheduler=scheduler)
    asked = make_request("next", 60, max_tokens=8, cache_salt="another")
    (expected,) = SteppedEngine(config).run([asked])
    with ranks_of(config, *sizes) as ranks:
        steps = SteppedEngine(config, ranks).scheduler
        launched: deque[PendingTokens] = deque()
        outputs: list[RequestOutput] = []

        def step() -> None:
            if batch := steps.schedule(0.0):
                launched.append(ranks.execute(batch))
            if launched and (not batch or len(launched) == ranks.info.max_in_flight):
                outputs.extend(steps.update(launched.popleft().wait()))

        steps.add(make_request("aborted", 70, max_tokens=30))
        for _ in range(num_steps):
            step()
        steps.abort(RequestId("aborted"))
        steps.add(asked)
        outputs.clear()
        while steps.has_work or launched:
            step()
    assert ids_of([each for each in outputs if each.request_id == "next"]) == ids_of(expected)
