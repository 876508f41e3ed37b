"""The priority policy: who is next, and that nobody waits for ever."""

from penstock.scheduler.config import Policy, SchedulerConfig
from tests.support.scheduling import Driver, make_request


def make_driver(*, num_blocks: int = 200, max_num_seqs: int = 1) -> Driver:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=32, policy=Policy.PRIORITY
    )
    return Driver(num_blocks=num_blocks, block_size=4, max_model_len=60, config=config)


def test_a_flood_of_urgent_requests_does_not_starve_the_others() -> None:
    driver = make_driver()
    driver.scheduler.add(make_request("patient", 8, max_tokens=3, priority=9))
    num_urgent = 0
    while ("patient", 0) not in driver.finishes:
        while driver.scheduler.num_waiting < 5:
            driver.scheduler.add(make_request(f"urgent{num_urgent}", 8, max_tokens=3))
            num_urgent += 1
        driver.step()
        assert num_urgent < 40, "it waits for ever"
    assert num_urgent > 7, "it was not urgent"


def test_those_that_wait_longest_get_one_admission_in_eight() -> None:
    driver = make_driver()
    for index in range(10):
        driver.scheduler.add(make_request(f"p{index}", 4, max_tokens=1, priority=5))
    for index in range(200):
        driver.scheduler.add(make_request(f"u{index}", 4, max_tokens=1))
    while sum(name[0] == "u" for name, _ in driver.finishes) < 63:
        driver.step()
    patient = [name for name, _ in driver.finishes if name[0] == "p"]
    assert patient == [f"p{index}" for index in range(8)]


def test_one_that_was_admitted_for_its_age_is_not_preempted_for_its_priority() -> None:
    driver = make_driver(num_blocks=18, max_num_seqs=4)
    driver.scheduler.add(make_request("patient", 20, max_tokens=20, priority=9))
    for index in range(30):
        driver.scheduler.add(make_request(f"u{index}", 12, max_tokens=24))
    driver.run()
    assert driver.scheduler.stats().preemptions_total > 0
    assert driver.finishes["patient", 0][0].num_preemptions == 0
