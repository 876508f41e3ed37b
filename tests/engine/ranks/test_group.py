"""The groups of ranks, in processes of their own."""

import hashlib
import os
import signal
import time

import pytest
import torch
from torch import Tensor

from penstock.engine.native.library import load_ranks_library
from penstock.engine.ranks.group import Group, RankFailed
from penstock.engine.ranks.layout import RankLayout
from penstock.engine.ranks.shared_memory import (
    RankMemory,
    SharedMemoryGroup,
    group_bytes,
    shared_memory,
)
from penstock.engine.ranks.torch_ranks import TorchRanks
from tests.engine.ranks.members import members, outputs

# Below, at and above what fits into a buffer at once, and not a multiple of anything.
SIZES = (1, 1000, 262_144, 600_001)
ME = "tests.engine.ranks.test_group"


def part(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 + rank)).to(dtype)


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


def run_everything(group: Group) -> list[str]:
    """Digests of what this rank has after each collective."""
    made = []
    for dtype in (torch.float32, torch.bfloat16):
        for count in SIZES:
            tensor = part(group.rank, count, dtype)
            group.all_reduce(tensor)
            made.append(digest(tensor))
    ids = torch.arange(300_000) * (group.rank + 1)
    group.broadcast(ids)
    made.append(digest(ids))
    group.barrier()
    gathered = group.gather(torch.full((3, 200_000), float(group.rank)))
    if gathered is not None:
        assert gathered.shape == (group.size, 3, 200_000)
        assert gathered[:, 0, 0].tolist() == list(range(group.size))
        assert all(len(each.unique()) == 1 for each in gathered)
    return made


def expected(size: int) -> list[str]:
    made = []
    for dtype in (torch.float32, torch.bfloat16):
        for count in SIZES:
            total = part(0, count, dtype).float()
            for rank in range(1, size):
                total += part(rank, count, dtype).float()
            made.append(digest(total.to(dtype)))
    return [*made, digest(torch.arange(300_000))]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_every_rank_has_the_bits_of_adding_in_the_order_of_the_ranks(size: int) -> None:
    with members(f"{ME}:run_everything", size) as processes:
        assert outputs(processes) == [expected(size)] * size


def run_everything_by_torch(ranks: TorchRanks) -> list[str]:
    return run_everything(ranks.everyone)


def test_gloo_gives_two_ranks_the_same() -> None:
    with members(f"{ME}:run_everything_by_torch", 2, backend="gloo") as processes:
        first, second = outputs(processes)
    assert first == second
    # gloo rounds bfloat16 as we do where there are two to add.
    assert first == expected(2)


def add_until_rank_1_stops(group: SharedMemoryGroup) -> tuple[str, float] | None:
    """The error of rank 0, and for how many seconds it waited."""
    tensor = torch.ones(1000)
    group.barrier()  # one may take long to start
    group.memory.timeout_s = 1.0
    for step in range(100):
        group.doing.step = step
        if group.rank == 1 and step == 99:
            os.kill(os.getpid(), signal.SIGSTOP)
        began_s = time.monotonic()
        with group.doing.during("layer 3"):
            try:
                group.all_reduce(tensor)
            except RankFailed as error:
                return str(error), time.monotonic() - began_s
    return None


def test_a_rank_that_hangs_ends_in_one_sentence_of_who_and_where() -> None:
    with members(f"{ME}:add_until_rank_1_stops", 2) as (first, _):
        ((error, waited_s),) = outputs([first])
    assert 1.0 <= waited_s < 10.0  # 1 s, unless the machine is busy
    assert error.startswith("rank 1 did not come within 1 s while rank 0 waited for it in step 99")
    assert ", layer 3 (all_reduce, collective " in error and "its last was " in error


def test_a_rank_that_has_ended_is_waited_for_no_longer() -> None:
    descriptor = shared_memory(group_bytes(load_ranks_library(), 2))
    memory = RankMemory(load_ranks_library(), descriptor, RankLayout(2), 0, 60.0)
    group = SharedMemoryGroup(memory, range(2))
    os.close(descriptor)
    group.end(1)
    with pytest.raises(
        RankFailed, match="rank 1 has ended while rank 0 waited for it in its start"
    ):
        group.barrier()


def add_until_rank_1_waits(ranks: TorchRanks) -> list[object]:
    """What rank 0 has of `least`, then the error of a rank that does not come, then of its end."""
    found: list[object] = [ranks.least([3 + ranks.rank, 9 - ranks.rank])]
    ranks.everyone.barrier()
    ranks.wait_at_most(1.0)
    if ranks.rank == 1:
        ranks.at(7, "launching")
        time.sleep(120)
    ranks.at(8, "launched")
    try:
        ranks.everyone.all_reduce(torch.ones(4))
    except RankFailed as error:
        found.append(str(error))
    ranks.end(1)
    try:
        ranks.everyone.all_reduce(torch.ones(4))
    except RankFailed as error:
        found.append(str(error))
    return found


def test_of_ranks_of_torch_one_that_hangs_or_has_ended_is_named_with_its_step() -> None:
    with members(f"{ME}:add_until_rank_1_waits", 2, backend="gloo") as (first, _):
        ((least, late, ended),) = outputs([first])
    assert least == [3, 8]
    assert late == (
        "rank 1 did not come within 1 s: it is at step 7, launching, and rank 0 waits at step 8, "
        "launched"
    )
    assert ended == "rank 1 has ended while rank 0 waited for it in step 8, launched"
