"""Layers with a window beside others: what is kept, what is given back, and what is found again."""

import pytest

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.scheduler import Scheduler
from tests.support.scheduling import Driver, make_request, run_alone

WINDOW = 8
WINDOWS = (None, WINDOW)
PROMPT = list(range(3, 43))


def driver(num_window_blocks: int, budget: int = 32) -> Driver:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget)
    return Driver(windows=WINDOWS, more_blocks=(num_window_blocks,), config=config)


def ids_of(driver: Driver, name: str, index: int = 0) -> list[int]:
    return driver.tokens[name, index]


def alone(name: str, prompt: list[int], max_tokens: int) -> list[int]:
    request = make_request(name, prompt, max_tokens=max_tokens)
    return ids_of(run_alone(request, windows=WINDOWS), name)


def test_a_window_gives_back_what_no_later_token_reads() -> None:
    window = driver(64)
    window.scheduler.add(make_request("a", PROMPT, max_tokens=60))
    held = []
    while window.scheduler.has_work:
        window.step()
        held.append(window.scheduler.stats().groups[1].num_used)
    # Three blocks have the 8 tokens wherever they begin; before that a chunk has 32 of its own.
    assert max(held[2:]) == 3 and max(held[:2]) <= 3 + 8
    assert window.scheduler.stats().groups[1].num_evictable == 99 // 4
    assert ids_of(window, "a") == alone("a", PROMPT, max_tokens=60)


def test_a_prefix_is_found_by_the_last_blocks_of_a_window_alone() -> None:
    window = driver(6)  # those of the prompt's beginning are evicted by those of its end
    window.scheduler.add(make_request("a", [*PROMPT, 50], max_tokens=1))
    window.run()
    for name, prompt, num_cached in (("b", [*PROMPT, 60], 40), ("c", [*PROMPT[:20], 60], 0)):
        window.scheduler.add(make_request(name, prompt, max_tokens=3))
        window.run()
        assert window.num_cached[name, 0] == num_cached
        assert ids_of(window, name) == alone(name, prompt, max_tokens=3)


def test_what_a_window_gave_back_is_found_until_it_is_evicted() -> None:
    window = driver(64)
    window.scheduler.add(make_request("a", [*PROMPT, 50], max_tokens=1))
    window.run()
    window.scheduler.add(make_request("b", [*PROMPT[:20], 60], max_tokens=3))
    window.run()
    assert window.num_cached["b", 0] == 20


def test_prompts_run_in_parts_that_the_pool_of_a_window_has_room_for() -> None:
    window = driver(3, budget=128)  # what one sequence needs at least
    for name in "ab":
        window.scheduler.add(make_request(name, [*PROMPT, ord(name)], max_tokens=20))
    window.run()
    assert max(max(batch.num_tokens) for batch in window.batches) <= 3 * 4
    for name in "ab":
        assert ids_of(window, name) == alone(name, [*PROMPT, ord(name)], max_tokens=20)


def test_an_answer_forks_while_the_first_still_has_what_it_reads() -> None:
    window = driver(64)
    window.scheduler.add(make_request("a", PROMPT, max_tokens=40, n=3, temperature=1.0))
    window.run()
    copies = [copy for batch in window.batches for copy in batch.copies]
    assert sorted(copy.group for copy in copies) == [0, 0, 1, 1]
    expected = run_alone(
        make_request("a", PROMPT, max_tokens=40, n=3, temperature=1.0), windows=WINDOWS
    )
    assert window.tokens == expected.tokens


def test_one_sequence_must_fit_every_pool() -> None:
    groups = [KVGroup(32), KVGroup(2, WINDOW, alignment=1)]
    with pytest.raises(InvalidConfig, match="holds 8 tokens"):
        Scheduler(SchedulerConfig(), groups=groups, block_size=4, max_model_len=128)


@pytest.mark.parametrize("alignment", [1, 4, 6, 16, 64])
@pytest.mark.parametrize("window", [1, 4, 7, 20, 64])
@pytest.mark.parametrize("block_size", [4, 6, 16, 64])
def test_no_sequence_needs_more_blocks_at_once_than_is_said(
    alignment: int, window: int, block_size: int
) -> None:
    group = KVGroup(0, window, alignment)
    needed = [
        position // block_size
        - group.first_read(position - position % block_size) // block_size
        + 1
        for position in range(400)
    ]
    assert max(needed) <= group.most_blocks(400, block_size) <= max(needed) + 1
