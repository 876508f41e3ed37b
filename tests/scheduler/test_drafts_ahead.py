"""Drafts in steps that are scheduled before the results of those before them are known."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.engine.step.loop import EngineLoop
from penstock.engine.step.messages import Submit
from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.drafts.drafter import Drafter
from penstock.scheduler.drafts.sources import MOST_MATCH, Found, OwnText
from penstock.scheduler.types import Request, SampledTokens
from tests.support.drafting import Adversary, EveryDraft, Oracle
from tests.support.inbox import ListInbox
from tests.support.scheduling import Driver, make_request, run_alone

STOPS = (7, 11, 13)


def _driver(
    oracle: Oracle, requests: list[Request], most: int = 3, num_in_flight: int = 2, **options: Any
) -> Driver:
    """windows and the like are those of `Driver`."""
    groups = {key: options[key] for key in ("windows",) if key in options}
    for request in requests:
        alone = run_alone(request, **groups).tokens
        oracle.learn(request, [alone[request.id, index] for index in range(request.n)])
    drafter = EveryDraft([oracle], most)
    made = Driver(drafter=drafter, num_in_flight=num_in_flight, **options)
    for request in requests:
        made.scheduler.add(request)
    return made


def _requests(num: int = 4, max_tokens: int = 40, **fields: Any) -> list[Request]:
    fields = {"temperature": 1.0, "stop_token_ids": STOPS, **fields}
    return [
        make_request(str(i), [3 + i, 4, 5 + i] * 3, max_tokens=max_tokens, seed=i, **fields)
        for i in range(num)
    ]


def _check_answers(driver: Driver, requests: list[Request], **options: Any) -> None:
    assert not any(group.num_used for group in driver.scheduler.stats().groups)
    for request in requests:
        alone = run_alone(request, **options)
        for index in range(request.n):
            key = request.id, index
            assert driver.tokens[key] == alone.tokens[key]
            (finish,), (expected,) = driver.finishes[key], alone.finishes[key]
            assert finish[:2] == expected[:2]


@pytest.mark.parametrize("num_in_flight", [1, 2, 3])
@pytest.mark.parametrize("source", [0.0, 0.5, 1.0, "adverse"])
@pytest.mark.parametrize("windows", [(None,), (9,), (None, 6)])
def test_answers_are_those_without_drafts(
    num_in_flight: int, source: float | str, windows: tuple[int | None, ...]
) -> None:
    requests = _requests(n=2)
    oracle = Oracle(source) if isinstance(source, float) else Adversary()
    more = (64,) * (len(windows) - 1)
    driver = _driver(
        oracle, requests, num_in_flight=num_in_flight, windows=windows, more_blocks=more
    )
    driver.run()
    _check_answers(driver, requests, windows=windows)
    (_, stats) = driver.scheduler.stats().drafts
    assert stats.num_drafts_total > 20
    if source == 0.0:
        assert stats.num_accepted_tokens <= 3  # by chance, at another place
    assert any(batch.num_unresolved for batch in driver.batches) == (num_in_flight > 1)


@pytest.mark.parametrize("num_in_flight", [1, 2, 3])
def test_a_right_draft_is_accepted_whatever_is_in_flight(num_in_flight: int) -> None:
    (request,) = requests = _requests(1, 60, stop_token_ids=())
    driver = _driver(Oracle(1.0), requests, 3, num_in_flight)
    driver.run()
    (_, stats) = driver.scheduler.stats().drafts
    assert stats.num_accepted_tokens == stats.num_draft_tokens_total
    # One by the prompt's step, and four in each step after it.
    assert len(driver.batches) == 1 + -(-59 // 4)
    _check_answers(driver, [request])


def test_rows_start_at_most_where_all_drafts_are_accepted() -> None:
    driver = _driver(Oracle(0.0), _requests(1, stop_token_ids=()), 3)
    first, second, third = (driver.launch() for _ in range(3))
    assert first and second and third
    assert (second.starts, second.num_tokens, second.num_unresolved) == ((9,), (4,), ())
    assert (third.starts, third.num_tokens, third.num_unresolved) == ((13,), (4,), (3,))
    driver.collect()
    driver.collect()
    fourth = driver.launch()
    assert fourth and (fourth.starts, fourth.num_unresolved) == ((14,), (3,))
    driver.collect()
    (sequence,) = driver.scheduler._decoding
    assert (sequence.num_computed, sequence.num_unresolved) == (15, 3)
    driver.collect()
    assert (sequence.num_computed, sequence.num_unresolved) == (12, 0)
    assert len(sequence.token_ids) == 13


@pytest.mark.parametrize("windows", [(None,), (9,), (6, 14)])
def test_no_step_waits_for_the_one_before(windows: tuple[int | None, ...]) -> None:
    requests = _requests(1, 80, stop_token_ids=())
    more = (64,) * (len(windows) - 1)
    driver = _driver(Oracle(0.6), requests, windows=windows, more_blocks=more, max_model_len=128)
    (sequence,) = driver.scheduler._requests[requests[0].id]
    while driver.scheduler.has_work:
        batch = driver.launch()
        # Towards its end it may be that all that it may have is in flight.
        is_near_its_end = sequence.num_computed >= sequence.max_length - 1
        assert batch or is_near_its_end
        if driver.launched and (not batch or len(driver.launched) >= 2):
            driver.collect()
    _check_answers(driver, requests, windows=windows)


def test_blocks_that_are_short_preempt_sequences_with_drafts_in_flight() -> None:
    requests = _requests(6, n=2)
    config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=32)
    driver = _driver(
        Oracle(0.5), requests, num_blocks=26, config=config, num_in_flight=3, max_model_len=64
    )
    driver.run()
    assert driver.scheduler.stats().preemptions_total
    _check_answers(driver, requests)


@pytest.mark.parametrize("num_steps", range(2, 9))
def test_an_abort_with_drafts_in_flight_frees_everything(num_steps: int) -> None:
    requests = _requests(3, stop_token_ids=())
    driver = _driver(Oracle(0.5), requests, num_in_flight=3)
    for _ in range(num_steps):
        driver.launch()
        if len(driver.launched) == 3:
            driver.collect()
    driver.record(driver.scheduler.abort(requests[1].id))
    driver.run()
    while driver.launched:
        driver.collect()
    _check_answers(driver, [requests[0], requests[2]])


def test_a_new_prompt_runs_beside_decodes_whose_drafts_are_not_resolved() -> None:
    requests = _requests(3, stop_token_ids=())
    oracle = Oracle(0.5)
    oracle.learn(requests[2], [run_alone(requests[2]).tokens[requests[2].id, 0]])
    driver = _driver(oracle, requests[:2])
    for _ in range(4):
        driver.step()
    driver.scheduler.add(requests[2])
    batch = driver.launch()
    assert batch and batch.num_decodes == 2 and len(batch.slots) == 3
    assert any(batch.num_unresolved) and not batch.drafts
    while driver.launched:
        driver.collect()
    driver.run()
    _check_answers(driver, requests)


@pytest.mark.parametrize("num_cohorts", [2, 3])
def test_in_a_pipeline_drafts_follow_ids_that_are_known(num_cohorts: int) -> None:
    requests = _requests(5, stop_token_ids=())
    driver = _driver(Oracle(1.0), requests, num_in_flight=num_cohorts, num_cohorts=num_cohorts)
    driver.run()
    assert not any(batch.num_unresolved for batch in driver.batches)
    (_, stats) = driver.scheduler.stats().drafts
    assert stats.num_accepted_tokens == stats.num_draft_tokens_total > 100
    _check_answers(driver, requests)


class Said:
    """A source that has the same text for each sequence, from its first token on."""

    name = "said"

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def find(self, sequence: Sequence) -> Found:
        return Found(self.text, len(sequence.token_ids), MOST_MATCH)

    def end(self, sequence: Sequence) -> None:
        pass


def _propose(
    drafter: Drafter, sequence: Sequence, in_flight: list[tuple[int, ...]], limit: int = 3
) -> tuple[int, ...]:
    (drafts,) = drafter.propose([sequence], [limit], 100, {sequence: in_flight})
    return drafts


def _sequence(token_ids: list[int]) -> Sequence:
    return Sequence(make_request("a", token_ids, max_tokens=100), 0, 0, 200)


@pytest.mark.parametrize(
    ("in_flight", "expected"),
    [
        ([], (13, 14, 15)),
        ([()], (14, 15, 16)),
        ([(), ()], (15, 16, 17)),
        # A row of drafts that are as the source says gives one more.
        ([(13, 14)], (16, 17, 18)),
        ([(), (14, 15)], (17, 18, 19)),
        # Those after the first that is not are not accepted.
        ([(13, 99, 15)], (15, 16, 17)),
        ([(99, 14), (99,)], (15, 16, 17)),
    ],
)
def test_drafts_follow_the_ids_in_flight_as_their_source_says_that_they_are(
    in_flight: list[tuple[int, ...]], expected: tuple[int, ...]
) -> None:
    drafter = EveryDraft([Said(list(range(10, 40)))], most=3)
    assert _propose(drafter, _sequence([10, 11, 12]), in_flight) == expected


def test_where_the_text_ends_before_the_ids_in_flight_there_is_no_draft() -> None:
    drafter = EveryDraft([Said(list(range(10, 15)))], most=3)
    assert _propose(drafter, _sequence([10, 11, 12]), [()]) == (14,)
    assert _propose(drafter, _sequence([10, 11, 12]), [(), ()]) == ()


def test_what_is_repeated_is_to_be_repeated_again() -> None:
    drafter = EveryDraft([OwnText()], most=5)
    assert _propose(drafter, _sequence([5, 6] * 4), [()], limit=5) == (6, 5, 6, 5, 6)


def test_what_a_grammar_has_next_is_left_of_after_the_ids_in_flight() -> None:
    drafter, sequence = EveryDraft([], most=3), _sequence([3])
    sequence.admit(0, 0, 0.0)
    drafter.hear([sequence], SampledTokens(1, [3], forced={0: (20, 21, 22, 23)}))
    assert _propose(drafter, sequence, [()]) == (21, 22, 23)
    assert _propose(drafter, sequence, [(), (21,)]) == (23,)


def test_a_draft_after_unknown_ids_is_worth_the_chance_of_all_of_it() -> None:
    drafter, sequence = Drafter([Said(list(range(10, 40)))], most=3), _sequence([10])
    offers = [drafter._best_offer(sequence, 3, each) for each in ([], [()])]
    known, unknown = (drafter._chances(sequence, each) for each in offers if each)
    assert known[1:] == unknown[:2]


def test_what_was_supposed_wrongly_is_learned_where_it_was_wrong() -> None:
    drafter, sequence = EveryDraft([Said(list(range(10, 40)))], most=3), _sequence([10])
    rates = drafter._acceptance.rates("said", MOST_MATCH)
    assert _propose(drafter, sequence, [(), ()]) == (13, 14, 15)
    sequence.token_ids += [11, 99]  # the second is not what was supposed
    drafter.judge(sequence, 0)
    assert (rates._tried[:3], rates._accepted[:2]) == ([1.0, 1.0, 0.0], [1.0, 0.0])


def test_several_steps_in_flight_are_judged_in_their_order() -> None:
    drafter, sequence = EveryDraft([Said(list(range(10, 40)))], most=3), _sequence([10])
    rates = drafter._acceptance.rates("said", MOST_MATCH)
    assert _propose(drafter, sequence, []) == (11, 12, 13)
    assert _propose(drafter, sequence, [(11, 12, 13)]) == (15, 16, 17)
    drafter.judge(sequence, 3)
    assert rates._tried[:4] == rates._accepted[:4] == [1.0, 1.0, 1.0, 0.0]
    sequence.token_ids += [11, 12, 13, 14]
    drafter.judge(sequence, 1)
    assert rates._tried[3:7] == [1.0, 1.0, 1.0, 0.0]
    assert rates._accepted[3:6] == [1.0, 1.0, 0.0]
    said = drafter.stats[1]
    assert (said.num_draft_tokens_total, said.num_accepted_tokens) == (6, 4)


def test_the_loop_launches_a_step_with_drafts_before_it_waits_for_the_last() -> None:
    requests = _requests(1, 41, stop_token_ids=())
    driver = _driver(Oracle(1.0), requests)
    driver.scheduler.abort(requests[0].id)
    executor, events = driver.executor, list[str]()
    executor.info = replace(executor.info, runs_ahead=True)
    execute = executor.execute

    class Noting:
        def __init__(self, pending: Any) -> None:
            self._pending = pending

        def wait(self) -> Any:
            events.append("wait")
            return self._pending.wait()

    def noting(batch: Any) -> Any:
        events.append("launch")
        return Noting(execute(batch))

    executor.execute = noting  # type: ignore[method-assign]
    inbox = ListInbox()
    loop = EngineLoop(driver.scheduler, executor, inbox, lambda message: None)
    inbox.commands.append(Submit(requests[0]))
    while not events or driver.scheduler.has_work:
        loop.step()
    # The prompt's step, ten of four tokens, and never none that runs while the host schedules.
    assert events == ["launch", *["launch", "wait"] * 10, "wait"]


def test_results_of_a_preempted_sequence_are_its_own_all_the_same() -> None:
    request = _requests(1, stop_token_ids=())[0]
    driver = _driver(Oracle(1.0), [request])
    driver.launch()
    driver.launch()
    (sequence,) = driver.scheduler._decoding
    driver.scheduler._preempt(sequence)
    assert (sequence.num_computed, sequence.num_unresolved) == (0, 0)
    driver.collect()
    driver.collect()
    assert len(sequence.token_ids) == 9 + 5 and sequence.num_ever_computed == 9 + 4
    driver.run()
    (finish,) = driver.finishes[request.id, 0]
    assert finish.num_recomputed_tokens == 9 + 4 - 8  # two blocks were found
    assert driver.tokens[request.id, 0] == run_alone(request).tokens[request.id, 0]
