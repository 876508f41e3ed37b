"""Ranks that torch connects, in stages and in processes of their own: by gloo, on the host."""

import os
import time

import pytest
import torch

from penstock.engine.ranks.board import Board, board_memory
from penstock.engine.ranks.group import RankFailed
from penstock.engine.ranks.torch_ranks import TorchRanks
from tests.engine.ranks.members import members, outputs

ME = "tests.engine.ranks.test_torch_ranks"
NUM_STEPS = 3


def pass_states(ranks: TorchRanks) -> list[object]:
    """Each stage multiplies the states by 10 and adds what its ranks add together: their numbers.
    Returns the place of this rank, and the states of each step after it."""
    pipeline = ranks.pipeline
    assert pipeline is not None
    pipeline.allocate(4, 2, torch.float32, torch.device("cpu"))
    found: list[object] = [pipeline.stage, ranks.tensor.rank]
    for step in range(1, NUM_STEPS + 1):
        num_tokens = step
        pipeline.receive(num_tokens)
        first = pipeline.before is None
        states = torch.full((num_tokens, 2), float(step)) if first else pipeline.arrived(num_tokens)
        added = torch.full_like(states, float(ranks.rank + 1))
        ranks.tensor.all_reduce(added)
        states.mul_(10).add_(added)
        if pipeline.after is not None:
            pipeline.send(states)
        found.append(states[-1].tolist())
    return found


def expected(of_stages: list[float]) -> list[list[float]]:
    """After the last of these stages, that add so much."""
    values = [float(step) for step in range(1, NUM_STEPS + 1)]
    for added in of_stages:
        values = [value * 10 + added for value in values]
    return [[value, value] for value in values]


@pytest.mark.slow  # two stages of two ranks show the rest
def test_states_pass_three_stages_in_the_order_of_the_steps() -> None:
    with members(f"{ME}:pass_states", 3, backend="gloo", num_stages=3) as processes:
        found = outputs(processes)
    # Rank 0 has the last stage, and adds 1.
    assert found == [
        [2, 0, *expected([2, 3, 1])],
        [0, 0, *expected([2])],
        [1, 0, *expected([2, 3])],
    ]


def test_of_two_stages_of_two_ranks_each_rank_sends_to_the_one_with_its_part() -> None:
    with members(f"{ME}:pass_states", 4, backend="gloo", num_stages=2) as processes:
        found = outputs(processes)
    first, last = expected([3 + 4]), expected([3 + 4, 1 + 2])
    assert found == [[1, 0, *last], [1, 1, *last], [0, 0, *first], [0, 1, *first]]


def wait_for_a_stage_that_hangs(ranks: TorchRanks) -> str | None:
    """The error of rank 0, whose stage before does not come."""
    pipeline = ranks.pipeline
    assert pipeline is not None
    pipeline.allocate(4, 2, torch.float32, torch.device("cpu"))
    ranks.at(7 if ranks.rank else 8, "launching")
    ranks.everyone.barrier()
    ranks.wait_at_most(1.0)
    if ranks.rank:
        time.sleep(120)
    try:
        pipeline.receive(1)
    except RankFailed as error:
        return str(error)
    return None


def test_a_stage_that_hangs_is_named_with_its_step() -> None:
    processes_of = members(f"{ME}:wait_for_a_stage_that_hangs", 2, backend="gloo", num_stages=2)
    with processes_of as (first, _):
        (error,) = outputs([first])
    assert error == (
        "rank 1 (stage 0) did not come within 1 s: it is at step 7, launching, and rank 0 (stage "
        "1) waits at step 8, launching"
    )


def test_the_time_of_a_step_is_known_until_many_later_ones() -> None:
    descriptor = board_memory(2)
    board, other = Board(descriptor), Board(descriptor)
    os.close(descriptor)
    board.write(1, 9, "launching")
    for step in range(1, 10):
        board.record(1, step, step / 100)
    assert [other.computed_s(1, step) for step in (9, 5, 10)] == [0.09, 0.05, None]
    board.record(1, 9 + 64, 1.0)
    assert other.computed_s(1, 9) is None and other.computed_s(0, 9) is None
    assert str(other.read(1)) == "step 9, launching"
