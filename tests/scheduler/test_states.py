"""Layers with a recurrence beside others: which states are kept, and what is found by them."""

import pytest

from penstock.scheduler.cache.state_cache import OPENING
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.drafts.drafter import Drafter
from tests.support.drafting import EveryDraft, Oracle
from tests.support.scheduling import Driver, make_request, run_alone

BLOCK = 4
PROMPT = list(range(3, 43))  # ten blocks


def driver(
    num_states: int = 16,
    *,
    max_num_seqs: int = 4,
    caching: bool = True,
    drafter: Drafter | None = None,
) -> Driver:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=32, enable_prefix_caching=caching
    )
    return Driver(config=config, num_states=num_states, drafter=drafter)


def ask(states: Driver, name: str, prompt: list[int], max_tokens: int = 3, n: int = 1) -> int:
    """Runs a request to its end. How many of its prompt's tokens were cached; its answers are those
    that it has alone."""
    request = make_request(name, prompt, max_tokens=max_tokens, n=n, temperature=float(n > 1))
    states.scheduler.add(request)
    states.run()
    alone = run_alone(request, num_states=16)
    for index in range(n):
        assert states.tokens[name, index] == alone.tokens[name, index]
    return states.num_cached[name, 0]


def num_prefilled(states: Driver, first_batch: int) -> int:
    """Tokens of prompts that were computed from this batch on."""
    return sum(sum(b.num_tokens[b.num_decodes :]) for b in states.batches[first_batch:])


def test_a_running_sequence_has_one_state_and_gives_it_back() -> None:
    states = driver(caching=False)
    for name in "abc":
        states.scheduler.add(make_request(name, PROMPT, max_tokens=9))
    states.step()
    states.step()
    group = states.scheduler.stats().groups[1]
    assert (group.is_recurrent, group.num_used, group.num_free) == (True, 2, 14)
    states.run()
    assert states.scheduler.stats().groups[1].num_free == 16


def test_no_more_sequences_run_than_there_are_states() -> None:
    states = driver(num_states=2)
    for name in "abc":
        states.scheduler.add(make_request(name, PROMPT[:4], max_tokens=9))
    most = 0
    while states.scheduler.has_work:
        states.step()
        most = max(most, states.scheduler.num_running)
    assert most == 2


def test_the_next_turn_computes_its_new_tokens_alone_however_long_the_first_was() -> None:
    computed = []
    for length in (20, 100):
        states = driver()
        prompt = [3 + i % 50 for i in range(length)]
        assert ask(states, "first", prompt, max_tokens=13) == 0
        second = [*prompt, *states.tokens["first", 0], *range(60, 70)]
        first_batch = len(states.batches)
        num_cached = ask(states, "second", second)
        computed.append(num_prefilled(states, first_batch))
        assert computed[-1] == len(second) - num_cached
        # All but the rest of the block in which the first answer ended.
        assert 10 < computed[-1] <= 10 + BLOCK
    assert computed[0] == computed[1]


def test_the_next_turn_is_found_where_the_template_opens_its_answer_differently() -> None:
    states = driver()
    ask(states, "first", [*PROMPT, 60, 61, 62], max_tokens=13)
    second = [*PROMPT, 60, 63, *range(70, 90)]
    assert ask(states, "second", second) == (len(PROMPT) + 3 - OPENING) // BLOCK * BLOCK


def test_the_snapshot_of_an_answer_replaces_the_one_before() -> None:
    states = driver()
    ask(states, "a", PROMPT, max_tokens=40)
    assert states.scheduler.stats().groups[1].num_evictable == 2


def test_where_two_prompts_part_a_third_goes_on() -> None:
    states = driver()
    assert ask(states, "a", [*PROMPT, *range(50, 70)]) == 0
    assert ask(states, "b", [*PROMPT, *range(70, 90)]) == 0  # no state there yet
    assert states.scheduler.stats().prefix_stateless_tokens_total == len(PROMPT)
    assert ask(states, "c", [*PROMPT, *range(20, 40)]) == len(PROMPT)
    assert states.scheduler.stats().prefix_stateless_tokens_total == len(PROMPT)


def test_samples_of_a_prompt_go_on_from_its_snapshot() -> None:
    states = driver()
    ask(states, "a", PROMPT, max_tokens=9, n=3)
    assert num_prefilled(states, 0) == 40 + 2 * (40 - (40 - OPENING) // BLOCK * BLOCK)


def test_samples_have_the_same_answers_where_nothing_is_cached() -> None:
    ask(driver(caching=False), "a", PROMPT, max_tokens=9, n=3)


def test_snapshots_used_least_recently_are_evicted_first() -> None:
    states = driver(num_states=3, max_num_seqs=1)  # one that runs, and two snapshots
    prompts = {name: [ord(name)] * 20 for name in "abc"}
    ask(states, "a", prompts["a"], max_tokens=1)
    ask(states, "b", prompts["b"], max_tokens=1)
    assert ask(states, "a2", prompts["a"], max_tokens=1) == 12
    ask(states, "c", prompts["c"], max_tokens=1)
    assert ask(states, "b2", prompts["b"], max_tokens=1) == 0
    assert ask(states, "c2", prompts["c"], max_tokens=1) == 12


def test_where_all_states_are_used_no_snapshot_is_taken() -> None:
    states = driver(num_states=1)
    ask(states, "a", PROMPT)
    assert not any(batch.snapshots for batch in states.batches)
    assert states.scheduler.stats().groups[1].num_free == 1


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("most", [3, 9])
def test_with_drafts_an_answers_snapshot_is_of_what_was_accepted(share: float, most: int) -> None:
    request = make_request("a", PROMPT, max_tokens=41)
    alone = run_alone(request, num_states=16)
    oracle = Oracle(share)
    oracle.learn(request, [alone.tokens["a", 0]])
    states = driver(drafter=EveryDraft([oracle], most))
    assert ask(states, "a", PROMPT, max_tokens=41) == 0
    states.scheduler._drafter = None
    assert states.scheduler.stats().groups[1].num_evictable == 2
    assert states.scheduler.stats().groups[1].num_used == 0
    # The next turn goes on from the last full block or, where drafts were accepted beyond several,
    # from one before.
    second = [*PROMPT, *states.tokens["a", 0], *range(60, 70)]
    num_cached = ask(states, "b", second)
    assert num_cached <= 80 and num_cached >= 80 - (BLOCK * 2 if most > BLOCK else 0)


def test_a_preempted_sequence_goes_on_from_its_last_snapshot() -> None:
    states = driver()
    request = make_request("a", PROMPT, max_tokens=60)
    states.scheduler.add(request)
    for _ in range(30):
        states.step()
    states.scheduler._preempt_one()
    states.run()
    assert states.tokens["a", 0] == run_alone(request, num_states=16).tokens["a", 0]
    finish = states.finishes["a", 0][0]
    assert finish.num_preemptions == 1 and finish.num_recomputed_tokens <= BLOCK


def test_sequences_that_preempt_each_other_have_the_same_answers() -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32)
    states = Driver(num_blocks=32, config=config, num_states=16)
    requests = [make_request(name, [ord(name), *PROMPT[:30]], max_tokens=60) for name in "abc"]
    for request in requests:
        states.scheduler.add(request)
    states.run()
    assert states.scheduler.stats().preemptions_total
    for request in requests:
        alone = run_alone(request, num_states=16)
        assert states.tokens[request.id, 0] == alone.tokens[request.id, 0]
