"""The fair policy: tenants that ask for more than there is get equal shares."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.config import Batching, Policy, SchedulerConfig
from penstock.scheduler.policy.fairness import FairQueue
from penstock.scheduler.types import FinishReason, FurtherTokens
from tests.support.scheduling import Driver, make_request


def make_driver(*, num_blocks: int = 400, max_num_seqs: int = 4, budget: int = 32) -> Driver:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        policy=Policy.FAIR,
        enable_prefix_caching=False,
    )
    return Driver(num_blocks=num_blocks, block_size=4, max_model_len=100, config=config)


def flood(driver: Driver, tenant: str, num: int, *, prompt: int = 20, max_tokens: int = 10) -> None:
    for index in range(num):
        name = f"{tenant}{index}"
        driver.scheduler.add(make_request(name, prompt, max_tokens=max_tokens, tenant=tenant))


def fair(driver: Driver) -> FairQueue:
    queue = driver.scheduler._waiting
    assert isinstance(queue, FairQueue)
    return queue


def num_ended(driver: Driver) -> Counter[str]:
    return Counter(name[0] for name, _ in driver.finishes)


def test_two_floods_get_equal_shares_whoever_came_first() -> None:
    driver = make_driver()
    flood(driver, "a", 60)
    flood(driver, "b", 60)
    for _ in range(120):
        driver.step()
    ended = num_ended(driver)
    assert ended["a"] >= 10 and abs(ended["a"] - ended["b"]) <= 3
    counters = [tenant.counter for tenant in fair(driver)._active.values()]
    # Sheng et al. 2024, theorem 4.8, of tenants that always have something waiting.
    assert abs(counters[0] - counters[1]) <= 2 * max(20, 2 * 4 * 10)


def test_an_output_token_counts_as_two_prompt_tokens() -> None:
    """So that prompts alone get more of them than answers do."""
    driver = make_driver(max_num_seqs=8)
    flood(driver, "p", 300, prompt=39, max_tokens=1)
    flood(driver, "o", 300, prompt=1, max_tokens=40)
    for _ in range(150):
        driver.step()
    counters = {name: tenant.counter for name, tenant in fair(driver)._active.items()}
    assert abs(counters["p"] - counters["o"]) < 0.2 * counters["p"]


def test_tokens_that_came_by_drafts_are_charged_as_others() -> None:
    queue = FairQueue()
    sequences = [Sequence(make_request(name, 3, tenant=name), 0, 0, 9) for name in "ab"]
    for sequence in sequences:
        queue.open(sequence.request.tenant, 1)
    before = [queue.tenant_of(each).counter for each in sequences]
    queue.charge_outputs(sequences, {1: FurtherTokens([5, 6])})
    charged = [queue.tenant_of(each).counter for each in sequences]
    assert [after - at for after, at in zip(charged, before, strict=True)] == [2.0, 6.0]


def test_a_newcomer_is_admitted_before_what_a_flood_has_waiting() -> None:
    driver = make_driver()
    flood(driver, "a", 50)
    for _ in range(10):
        driver.step()
    flood(driver, "b", 1, prompt=8, max_tokens=3)
    for _ in range(6):
        driver.step()
    assert num_ended(driver)["b"] == 1
    assert driver.scheduler.num_waiting > 30


def test_a_newcomers_prompt_is_computed_before_the_rest_of_long_ones() -> None:
    driver = make_driver(budget=8)
    flood(driver, "a", 3, prompt=80)
    driver.step()
    flood(driver, "b", 1, prompt=8, max_tokens=1)
    for _ in range(2):
        driver.step()
    assert num_ended(driver)["b"] == 1


def num_running(driver: Driver) -> dict[str, int]:
    return {name: tenant.num_running for name, tenant in fair(driver)._active.items()}


def with_two_floods() -> Driver:
    """Of four slots the first one, "a", has all, when the second one, "b", arrives."""
    driver = make_driver(max_num_seqs=4)
    flood(driver, "a", 20, max_tokens=70)
    for _ in range(5):
        driver.step()
    flood(driver, "b", 20, prompt=8, max_tokens=60)
    return driver


def test_a_second_flood_takes_slots_until_it_has_an_equal_share() -> None:
    driver = with_two_floods()
    for _ in range(12):
        driver.step()
    assert num_running(driver) == {"a": 2, "b": 2}
    assert driver.scheduler.stats().preemptions_total == 2
    for _ in range(20):
        driver.step()
    assert driver.scheduler.stats().preemptions_total == 2  # nobody is above its share


def test_a_burst_of_one_who_is_owed_takes_more_than_an_equal_share_of_the_slots() -> None:
    driver = make_driver(max_num_seqs=16, budget=64)
    flood(driver, "a", 60, max_tokens=70)
    for _ in range(12):
        driver.step()
    flood(driver, "b", 16, prompt=1, max_tokens=2)
    for _ in range(8):
        driver.step()
        driver.now += 0.1
        # A quarter of an equal share stays with the flood.
        assert num_running(driver)["a"] >= 2
        if "b" not in num_running(driver):
            break
    assert num_ended(driver)["b"] == 16
    assert driver.scheduler.stats().preemptions_total <= 16


def under_a_flood(seconds: float) -> Driver:
    """One tenant was served once; then another floods for so long."""
    driver = make_driver()
    flood(driver, "a", 1)
    driver.run()
    flood(driver, "b", 400)
    until_s = driver.now + seconds
    while driver.now < until_s:
        driver.step()
        driver.now += 0.1
    return driver


def test_one_who_comes_back_has_saved_up_its_share_of_ten_seconds_at_most() -> None:
    for seconds in (30.0, 60.0):
        driver = under_a_flood(seconds)
        served, rate = fair(driver)._active["b"].counter, fair(driver)._service_rate
        driver.scheduler.add(make_request("again", 20, tenant="a"))
        saved = served - fair(driver)._active["a"].counter
        assert saved == pytest.approx(min(served - 40, 10.0 * rate / 2)) and saved > 0
        assert rate < 2 * served / seconds


def test_a_new_one_may_burst_as_one_who_comes_back() -> None:
    driver = under_a_flood(30.0)
    rate = fair(driver)._service_rate
    driver.scheduler.add(make_request("new", 20, tenant="c"))
    counters = {name: each.counter for name, each in fair(driver)._active.items()}
    assert counters["b"] - counters["c"] == pytest.approx(
        min(counters["b"], 10.0 * rate / fair(driver)._num_recent)
    )


def test_who_asks_for_more_than_runs_has_saved_nothing_up() -> None:
    driver = under_a_flood(30.0)
    counters = fair(driver)._active
    flood(driver, "a", 8)
    assert counters["a"].counter < counters["b"].counter
    flood(driver, "c", 9)
    assert counters["c"].counter == counters["a"].counter  # the least of the others


def test_a_burst_of_one_who_asked_for_little_comes_before_what_a_flood_has_waiting() -> None:
    driver = under_a_flood(30.0)
    for index in range(6):
        driver.scheduler.add(make_request(f"x{index}", 20, max_tokens=5, tenant="a"))
    before = num_ended(driver)["b"]
    for _ in range(60):
        driver.step()
        if num_ended(driver)["x"] == 6:
            break
    assert num_ended(driver)["x"] == 6
    # Those of the flood that ran already, and in the slots that are its equal share.
    assert num_ended(driver)["b"] - before <= 6


def test_what_is_computed_again_is_not_charged() -> None:
    driver = make_driver(num_blocks=26, max_num_seqs=4)
    flood(driver, "a", 6, prompt=20, max_tokens=20)
    driver.run()
    assert driver.scheduler.stats().recomputed_tokens_total > 0
    # A prompt's first output is of its last chunk, and so is one after a preemption.
    num_preemptions = driver.scheduler.stats().preemptions_total
    computed = 6 * (20 + 2 * 20)
    assert computed - 12 <= fair(driver)._tenants["a"].counter <= computed + num_preemptions


def test_tokens_that_an_aborted_answer_did_not_have_are_not_charged() -> None:
    driver = make_driver()
    flood(driver, "a", 1, prompt=20, max_tokens=50)
    for _ in range(6):
        driver.step()
    driver.record(driver.scheduler.abort(make_request("a0", 1).id))
    assert driver.finishes["a0", 0][0].reason is FinishReason.ABORT
    assert fair(driver)._tenants["a"].counter < 20 + 2 * 8


def test_the_index_tells_a_share_of_all_from_an_equal_one() -> None:
    queue = FairQueue()
    for name in "ab":
        queue.open(name, 1)
    driver = make_driver(max_num_seqs=1)
    flood(driver, "a", 50)
    flood(driver, "b", 50)
    for _ in range(300):
        driver.step()
        driver.now += 0.05
    assert driver.scheduler.stats().fairness_index is not None
    assert 0.9 < fair(driver).fairness <= 1.0
    fair(driver)._active["a"].recent *= 50
    fair(driver).begin_step(driver.now + 2)
    assert fair(driver).fairness < 0.6


def test_many_keys_that_came_once_are_forgotten() -> None:
    queue = FairQueue()
    for index in range(20_000):
        queue.open(str(index), 1)
        queue.close(str(index))
    assert len(queue._tenants) < 5000 and not queue._active


def prompt_tokens(driver: Driver) -> int:
    """Of the next step."""
    batch = driver.step()
    driver.now += 0.1
    return sum(batch.num_tokens[batch.num_decodes :]) if batch else 0


def test_a_flood_has_a_quantum_of_each_step_while_another_key_is_about() -> None:
    driver = make_driver(num_blocks=4000, max_num_seqs=64, budget=2048)
    flood(driver, "a", 400, prompt=90, max_tokens=2)
    driver.now = 100.0
    assert prompt_tokens(driver) > 1900  # alone, it has all
    flood(driver, "b", 1, prompt=50, max_tokens=1)
    for _ in range(12):
        prompt_tokens(driver)
    assert num_ended(driver)["b"] == 1
    assert 0 < prompt_tokens(driver) <= 512
    driver.now += 60.0
    prompt_tokens(driver)
    driver.now += 2.0
    assert max(prompt_tokens(driver) for _ in range(3)) > 1900


def test_a_step_with_a_quiet_keys_prompt_has_none_of_a_flood() -> None:
    driver = make_driver(num_blocks=4000, max_num_seqs=64, budget=2048)
    flood(driver, "a", 400, prompt=60, max_tokens=30)
    flood(driver, "b", 1, prompt=10, max_tokens=1)
    driver.now = 100.0
    for _ in range(12):
        prompt_tokens(driver)
    flood(driver, "c", 1, prompt=77, max_tokens=1)
    assert prompt_tokens(driver) == 77


@settings(max_examples=40)
@given(
    num_slots=st.integers(2, 8),
    caching=st.booleans(),
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 40), st.sampled_from("abc"), st.integers(1, 40), st.integers(1, 30)
        ),
        min_size=1,
        max_size=40,
    ),
)
def test_everyone_has_the_same_answer_and_none_is_preempted_for_others_often(
    num_slots: int, caching: bool, arrivals: list[tuple[int, str, int, int]]
) -> None:
    """Where there are blocks for all. A flood is there from the beginning."""
    tokens = []
    for policy in (Policy.FCFS, Policy.FAIR):
        config = SchedulerConfig(
            max_num_seqs=num_slots,
            max_num_batched_tokens=32,
            policy=policy,
            enable_prefix_caching=caching,
        )
        driver = Driver(num_blocks=400, block_size=4, max_model_len=100, config=config)
        flood(driver, "f", 30)
        pending = sorted(arrivals, reverse=True)
        for step in range(3000):
            while pending and pending[-1][0] <= step:
                _, tenant, prompt, max_tokens = pending.pop()
                name = f"{tenant}-{len(pending)}"
                request = make_request(name, prompt, max_tokens=max_tokens, tenant=tenant)
                driver.scheduler.add(request)
            before = driver.scheduler.stats().preemptions_total
            driver.step()
            driver.now += 0.1
            assert driver.scheduler.stats().preemptions_total - before <= 4
            if not pending and not driver.scheduler.has_work:
                break
        stats = driver.scheduler.stats()
        assert stats.groups[0].num_used == 0
        assert stats.groups[0].num_free + stats.groups[0].num_evictable == 400
        ended = [finish for finishes in driver.finishes.values() for finish in finishes]
        assert len(ended) == 30 + len(arrivals)
        assert all(each.reason is FinishReason.LENGTH for each in ended)
        assert max(each.num_preemptions for each in ended) <= 4
        tokens.append(driver.tokens)
    assert tokens[0] == tokens[1]


def test_a_place_is_made_only_for_one_that_is_still_served_less_then() -> None:
    """The first of the second key brings it level with the flood, so its others wait a step."""
    driver = with_two_floods()
    for _ in range(3):
        before = driver.scheduler.stats().preemptions_total
        driver.step()
        num_left = driver.scheduler.stats().preemptions_total - before
        assert sum(num_running(driver).values()) == 4
        assert num_left == 0 or num_running(driver)["b"] == before + num_left


def test_nobody_leaves_a_batch_that_none_can_join() -> None:
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=32,
        policy=Policy.FAIR,
        batching=Batching.DYNAMIC,
    )
    driver = Driver(num_blocks=400, block_size=4, max_model_len=100, config=config)
    flood(driver, "a", 8)
    for _ in range(4):
        driver.step()
        driver.now += 0.1
    assert num_running(driver) == {"a": 4}
    flood(driver, "b", 2, max_tokens=2)
    for _ in range(3):
        driver.step()
        driver.now += 0.1
    assert driver.scheduler.stats().preemptions_total == 0
    driver.run()
    assert num_ended(driver) == {"a": 8, "b": 2}


@settings(max_examples=40)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 60), st.integers(1, 30)), max_size=20
    )
)
def test_a_single_key_is_scheduled_as_first_come_first_served(
    arrivals: list[tuple[int, int, int]],
) -> None:
    batches = []
    for policy in (Policy.FAIR, Policy.FCFS):
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, policy=policy)
        driver = Driver(num_blocks=60, block_size=4, max_model_len=100, config=config)
        pending = sorted(arrivals, reverse=True)
        for step in range(600):
            while pending and pending[-1][0] <= step:
                _, prompt, max_tokens = pending.pop()
                name = str(len(pending))
                driver.scheduler.add(make_request(name, prompt, max_tokens=max_tokens, tenant="a"))
            driver.step()
            driver.now += 0.1
        assert not driver.scheduler.has_work
        batches.append(driver.batches)
    assert batches[0] == batches[1]


def test_the_next_sequence_is_found_while_entries_that_are_out_of_date_are_swept() -> None:
    """The sweep renews the heap that `peek` walks."""
    queue = FairQueue()
    for tenant in "ba":
        queue.open(tenant, 3)
    sequences = [
        Sequence(make_request(tenant, 8, tenant=tenant), 0, order, 16)
        for order, tenant in enumerate("abb")
    ]
    *waiting, passing = sequences
    for sequence in waiting:
        queue.push(sequence)
    for _ in range(68):
        queue.push(passing)
        queue.remove(passing)
    for sequence in waiting:
        queue.tenant_of(sequence).charge(1.0)
    assert queue.peek() is queue.pop() is not None
