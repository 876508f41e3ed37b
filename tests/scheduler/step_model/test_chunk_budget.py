"""The most tokens of a prompt that a step may run beside its decodes."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.scheduler.stats import AttentionWork, GraphSizes, StepClass, StepWork
from penstock.scheduler.step_model.chunk_budget import ChunkBudget, TimedChunkBudget, chunk_budget
from penstock.scheduler.step_model.live import LiveStepModel
from penstock.scheduler.step_model.model import StepModel
from tests.support.made_up_steps import known_model, served_model

MOST = 4096


def with_chunks(num_decodes: int, context: int, chunks: list[tuple[int, int]]) -> StepWork:
    """A step of decodes at one context and of chunks: (start, tokens)."""
    keys = num_decodes * context
    pairs = keys + sum(n * start + n * (n + 1) // 2 for start, n in chunks)
    read = keys + sum(start + n for start, n in chunks)
    num = num_decodes + len(chunks)
    return StepWork(
        sum(n for _, n in chunks),
        num_decodes,
        num,
        num,
        0,
        (AttentionWork(read, pairs, keys),),
        num_chunks=len(chunks),
    )


def make_budget(
    model: StepModel,
    *,
    num_decodes: int,
    context: int,
    target_s: float,
    floor: int = 0,
    graph_sizes: GraphSizes | None = None,
) -> TimedChunkBudget:
    served = served_model(runs_ahead=model.runs_ahead)
    if graph_sizes:
        served = replace(served, graph_sizes=graph_sizes)
    made = chunk_budget(
        LiveStepModel(served, model),
        target_s,
        max_tokens=MOST,
        floor=floor,
        decodes=with_chunks(num_decodes, context, []),
    )
    assert isinstance(made, TimedChunkBudget)
    return made


def seconds(model: StepModel, work: StepWork) -> float:
    return model.cycle_s(served_model().amounts(work))


@settings(max_examples=150, deadline=None)
@given(
    runs_ahead=st.booleans(),
    num_decodes=st.integers(1, 64),
    context=st.integers(1, 3000),
    start=st.integers(0, 20_000),
    target_ms=st.floats(1.0, 120.0),
)
def test_it_is_the_most_that_ends_in_time(
    runs_ahead: bool, num_decodes: int, context: int, start: int, target_ms: float
) -> None:
    model, target_s = known_model(runs_ahead=runs_ahead), target_ms / 1e3
    budget = make_budget(model, num_decodes=num_decodes, context=context, target_s=target_s)
    most = budget.most(start)

    def took(num_tokens: int) -> float:
        return seconds(model, with_chunks(num_decodes, context, [(start, num_tokens)]))

    if most:
        assert took(most) <= target_s * 1.0001
    if most < MOST:
        assert took(most + 1) > target_s * 0.9999


def test_chunks_of_several_prompts_end_in_time_together() -> None:
    model = known_model(runs_ahead=False)
    budget = make_budget(model, num_decodes=20, context=500, target_s=0.02)
    chunks = []
    for start, wanted in ((0, 100), (3000, 80), (100, 4000), (0, 50)):
        if taken := budget.take(start, wanted):
            chunks.append((start, taken))
    assert len(chunks) == 3 and chunks[2][1] < 4000 and budget.is_spent
    took = seconds(model, with_chunks(20, 500, chunks))
    assert took <= 0.02 < took + 2e-3


def test_a_target_that_cannot_be_met_leaves_the_floor_once() -> None:
    model = known_model(runs_ahead=False)
    budget = make_budget(model, num_decodes=60, context=2000, target_s=1e-4, floor=64)
    assert budget.take(0, 40) == 40
    assert budget.take(0, 500) == 24
    assert budget.take(0, 500) == 0


def test_a_step_is_as_large_as_a_graph_and_not_a_little_larger() -> None:
    model, sizes = known_model(runs_ahead=True), GraphSizes((64,), (128, 256, 512, 8192))
    plain = make_budget(model, num_decodes=10, context=100, target_s=0.012).most(0)
    assert 256 < plain + 10 < 8192
    fitting = make_budget(
        model, num_decodes=10, context=100, target_s=0.012, graph_sizes=sizes
    ).most(0)
    assert fitting + 10 in sizes.chunks and fitting <= plain


def test_what_is_no_sum_is_part_of_the_time() -> None:
    slow = replace(known_model(runs_ahead=False), corrections={StepClass.MIXED: (1.0, 2.0)})
    budget = make_budget(slow, num_decodes=10, context=100, target_s=0.02)
    most = budget.most(0)
    assert (
        0
        < most
        < make_budget(
            known_model(runs_ahead=False), num_decodes=10, context=100, target_s=0.02
        ).most(0)
    )
    assert seconds(slow, with_chunks(10, 100, [(0, most)])) == pytest.approx(0.02, rel=0.01)


def test_without_decodes_or_a_target_or_a_model_tokens_alone_count() -> None:
    live = LiveStepModel(served_model(), known_model(runs_ahead=False))
    decodes, none = with_chunks(5, 100, []), with_chunks(0, 0, [])
    for model, target_s, work in (
        (None, 0.01, decodes),
        (live, None, decodes),
        (live, 0.01, none),
    ):
        budget = chunk_budget(model, target_s, max_tokens=MOST, decodes=work)
        assert type(budget) is ChunkBudget and budget.most(0) == MOST


def test_few_tokens_run_under_a_target_before_any_step_was_timed() -> None:
    live, decodes = LiveStepModel(served_model()), with_chunks(5, 100, [])
    for most, allowed in ((MOST, 256), (100, 100)):
        budget = chunk_budget(live, 0.01, max_tokens=most, decodes=decodes)
        assert budget.most(0) == allowed
