"""How many tokens a step has, and which prompts share it."""

import pytest

from penstock.scheduler.config import Policy, SchedulerConfig
from penstock.scheduler.groups import KVGroup
from penstock.scheduler.policy.step_size import StepSize
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.step_model.live import LiveStepModel
from penstock.scheduler.step_model.model import StepModel
from tests.support.made_up_steps import DEVICE, HOST, KNEE, served_model
from tests.support.scheduling import Driver, make_request

NUM_STEPS = 200  # more than it takes to look again


def step_size(
    step_s: float, *, most: int | None = None, runs_ahead: bool = False, is_known: bool = True
) -> StepSize:
    """Of a server whose steps take step_s, and 20 us for each token."""
    device = (step_s, *DEVICE[1:])
    model = StepModel(device=device, host=HOST, knee=KNEE, runs_ahead=runs_ahead)
    live = LiveStepModel(served_model(runs_ahead=runs_ahead), model if is_known else None)
    size = StepSize(SchedulerConfig(max_num_batched_tokens=most), live)
    for _ in range(NUM_STEPS):
        size.num_prompt_tokens(0)
    return size


@pytest.mark.parametrize(("step_s", "tokens"), [(0.0, 128), (3e-4, 256), (2e-3, 1024), (1, 2048)])
def test_the_more_every_step_costs_the_more_tokens_it_has(step_s: float, tokens: int) -> None:
    assert step_size(step_s).num_prompt_tokens(0) == tokens


def test_before_anything_is_known_a_step_is_short() -> None:
    assert step_size(1, is_known=False).num_prompt_tokens(0) == 256


def test_a_number_that_is_given_holds_whatever_steps_cost() -> None:
    assert step_size(0.0, most=4096).num_prompt_tokens(0) == 4096


def test_a_gpu_has_whole_steps() -> None:
    assert step_size(0.0, runs_ahead=True).num_prompt_tokens(0) == 2048


def test_decodes_are_tokens_too_and_leave_prompts_half_a_step() -> None:
    size = step_size(3e-4)
    assert [size.num_prompt_tokens(num) for num in (0, 56, 128, 200)] == [256, 200, 128, 128]


def test_decodes_and_prompts_together_never_exceed_the_flag() -> None:
    size = StepSize(SchedulerConfig(max_num_seqs=200, max_num_batched_tokens=300), None)
    assert [size.num_prompt_tokens(num) for num in (0, 100, 200)] == [300, 200, 150 - 50]


@pytest.mark.parametrize(("length", "rows"), [(150, 1), (60, 3), (300, 1)])
def test_a_prompt_does_not_wait_for_others_that_fill_its_step(length: int, rows: int) -> None:
    """A step of 256 tokens, which nobody joins once it has 128."""
    live = LiveStepModel(served_model())
    groups = (KVGroup(4000),)
    scheduler = Scheduler(
        SchedulerConfig(), groups=groups, block_size=16, max_model_len=2000, step_model=live
    )
    for number in range(4):
        scheduler.add(make_request(f"{number}", [5 + number] * length))
    batch = scheduler.schedule(0.0)
    assert batch and batch.num_tokens == (min(length, 256),) * rows


# A step of 32 tokens, and prompts that take several.


def busy(policy: Policy = Policy.FCFS, *, max_num_seqs: int = 4, priority: int = 0) -> Driver:
    """A prompt of 120 tokens has had one step, and 88 are left."""
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=32, policy=policy)
    driver = Driver(config=config)
    driver.scheduler.add(make_request("long", 120, priority=priority))
    driver.step()
    return driver


def steps_until_first_token(driver: Driver, name: str) -> int:
    num = 0
    while not driver.tokens[name, 0]:
        driver.step()
        num += 1
    return num


def test_a_short_prompt_does_not_wait_for_the_whole_of_a_long_one() -> None:
    driver = busy()
    driver.scheduler.add(make_request("short", [5] * 10))
    assert steps_until_first_token(driver, "short") == 1
    assert driver.batches[-1].num_tokens == (10, 22)


def test_a_long_prompt_keeps_half_of_every_step() -> None:
    driver = busy()
    for number in range(3):
        driver.scheduler.add(make_request(f"short{number}", [5 + number] * 14))
    driver.step()
    assert driver.batches[-1].num_tokens == (14, 2, 16)


def test_a_short_prompt_passes_a_long_one_that_waits_too() -> None:
    driver = busy()
    driver.scheduler.add(make_request("other", [9] * 80))
    driver.scheduler.add(make_request("short", [5] * 10))
    assert steps_until_first_token(driver, "short") == 1
    assert not driver.tokens["long", 0] and not driver.tokens["other", 0]


def test_of_prompts_as_long_as_each_other_the_first_is_computed_first() -> None:
    driver = busy()
    driver.scheduler.add(make_request("second", [9] * 88))
    assert steps_until_first_token(driver, "long") == 3
    assert not driver.tokens["second", 0]


def test_the_last_slot_is_for_who_came_first() -> None:
    driver = busy(max_num_seqs=2)
    driver.scheduler.add(make_request("other", [9] * 80))
    driver.scheduler.add(make_request("short", [5] * 10))
    steps_until_first_token(driver, "long")
    assert not driver.tokens["short", 0]


def test_no_more_short_prompts_pass_than_there_are_slots_for_them() -> None:
    """Of the three that are free, the last is for who came first."""
    driver = busy(max_num_seqs=4)
    driver.scheduler.add(make_request("other", [9] * 80))
    for number in range(6):
        driver.scheduler.add(make_request(f"short{number}", [5 + number] * 2))
    driver.step()
    assert driver.batches[-1].num_tokens == (2, 2, 28)


def test_a_short_prompt_passes_none_of_a_higher_priority() -> None:
    driver = busy(Policy.PRIORITY, priority=-1)
    driver.scheduler.add(make_request("short", [5] * 10))
    driver.step()
    driver.step()
    assert driver.batches[-1].num_tokens == (32,)
