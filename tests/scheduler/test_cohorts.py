"""Several steps in flight in a pipeline: who is in which step."""

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.drafts.drafter import Drafter
from penstock.scheduler.types import ScheduledBatch
from tests.support.drafting import EveryDraft, Oracle
from tests.support.scheduling import Driver, make_request, tokens_alone

CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128)


def driver_of(
    num_cohorts: int,
    config: SchedulerConfig = CONFIG,
    num_blocks: int = 128,
    drafter: Drafter | None = None,
) -> Driver:
    return Driver(num_blocks=num_blocks, num_cohorts=num_cohorts, config=config, drafter=drafter)


def decodes(batches: list[ScheduledBatch]) -> list[list[int]]:
    """The slots that decode, step by step."""
    return [sorted(batch.slots[: batch.num_decodes]) for batch in batches]


def test_the_sequences_are_divided_evenly_and_take_turns() -> None:
    driver = driver_of(2)
    for name in "abcdefg":
        driver.scheduler.add(make_request(name, 5, max_tokens=9))
    for _ in range(8):
        driver.step()
    steps = decodes(driver.batches)[1:]
    assert [len(step) for step in steps[:6]] == [4, 3, 4, 3, 4, 3]
    assert steps[0] == steps[2] == steps[4] and steps[1] == steps[3] == steps[5]
    assert not set(steps[0]) & set(steps[1])


def test_no_sequence_has_two_tokens_in_flight() -> None:
    driver = driver_of(3)
    for number in range(5):
        driver.scheduler.add(make_request(str(number), 4 + number, max_tokens=20))
    while driver.scheduler.has_work:
        driver.step()
        in_flight = [slot for batch in in_flight_of(driver) for slot in batch.slots]
        assert len(in_flight) == len(set(in_flight))


def in_flight_of(driver: Driver) -> list[ScheduledBatch]:
    return driver.batches[len(driver.batches) - len(driver.launched) :]


def test_cohorts_are_equal_again_after_all_of_one_have_ended() -> None:
    driver = driver_of(2)
    for number in range(8):
        # The first four are in one cohort.
        max_tokens = 4 if number < 4 else 30
        driver.scheduler.add(make_request(str(number), 5, max_tokens=max_tokens))
    for _ in range(20):
        driver.step()
    assert [len(step) for step in decodes(driver.batches)[-4:]] == [2, 2, 2, 2]


def test_the_steps_that_one_sequence_leaves_empty_are_not_launched() -> None:
    driver = driver_of(2)
    driver.scheduler.add(make_request("a", 5, max_tokens=4))
    for _ in range(12):
        driver.step()
        assert len(driver.launched) <= 1
    assert len(driver.batches) == 4


def test_chunks_of_a_prompt_follow_one_another_in_the_pipeline() -> None:
    driver = driver_of(3, SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8))
    driver.scheduler.add(make_request("a", 30, max_tokens=2))
    assert [driver.launch() for _ in range(3)] == driver.batches[:3]
    assert [batch.starts for batch in driver.batches] == [(0,), (8,), (16,)]
    driver.run()
    assert driver.tokens == tokens_alone(make_request("a", 30, max_tokens=2))


def test_answers_are_those_of_each_request_alone_whatever_is_preempted() -> None:
    config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=16)
    requests = [
        make_request(str(number), 9 + 5 * number, max_tokens=30, temperature=1.0, seed=number)
        for number in range(6)
    ]
    for num_cohorts in (2, 3):
        driver = driver_of(num_cohorts, config, num_blocks=40)
        for request in requests:
            driver.scheduler.add(request)
        driver.run()
        assert driver.scheduler.stats().preemptions_total > 0
        for request in requests:
            alone = tokens_alone(request)
            assert driver.tokens[request.id, 0] == alone[request.id, 0]


def test_nor_do_drafts_change_them_that_are_verified_while_their_sequence_is_preempted() -> None:
    config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=16)
    requests = [
        make_request(str(number), 9 + 5 * number, max_tokens=30, temperature=1.0, seed=number)
        for number in range(6)
    ]
    alone = {request.id: tokens_alone(request)[request.id, 0] for request in requests}
    for num_cohorts in (2, 3):
        oracle = Oracle(0.9)
        for request in requests:
            oracle.learn(request, [alone[request.id]])
        drafter = EveryDraft([oracle], most=5)
        driver = driver_of(num_cohorts, config, num_blocks=33, drafter=drafter)
        scheduler = driver.scheduler
        for request in requests:
            scheduler.add(request)
        while scheduler.has_work:
            driver.step()
            for (sequence,) in scheduler._requests.values():
                assert sequence.is_running or not sequence.num_computed
        assert scheduler.stats().preemptions_total > 0
        assert drafter.stats[-1].num_accepted_tokens > 30
        for request in requests:
            assert driver.tokens[request.id, 0] == alone[request.id]


def test_an_abort_in_flight_frees_everything() -> None:
    driver = driver_of(2)
    for name in "abcd":
        driver.scheduler.add(make_request(name, 5, max_tokens=20))
    for _ in range(4):
        driver.step()
    for name in "ab":
        driver.record(driver.scheduler.abort(make_request(name, 5).id))
    driver.run()
    assert driver.scheduler.stats().groups[0].num_used == 0
    assert {name for name, _ in driver.finishes} == set("abcd")
