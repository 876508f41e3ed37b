"""How many drafts an executor is asked for that can propose them itself."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.drafts.drafter import Drafter
from penstock.scheduler.drafts.prices import DraftPrices, Price
from penstock.scheduler.drafts.sources import Found
from penstock.scheduler.types import SampledTokens
from tests.support.drafting import EveryDraft, OracleProposer
from tests.support.scheduling import Driver, make_request, run_alone

STEP_S = 0.02


class _Priced(DraftPrices):
    """A step takes STEP_S, and a draft that it verifies this share of that."""

    def __init__(self, share: float) -> None:
        super().__init__(None)
        self.share = share

    def of(self, num_decodes: int, num_positions: int) -> Price:
        return Price(STEP_S, self.share * STEP_S)


class _Said:
    """A source that always has the same drafts."""

    name = "said"

    def find(self, sequence: Sequence) -> Found:
        return Found([5] * 8, 0, 16)

    def end(self, sequence: Sequence) -> None:
        pass


def _drafter(*sources: _Said, share: float = 0.05, most: int = 6) -> Drafter:
    drafter = Drafter(sources, most, proposes="model")
    drafter._prices = _Priced(share)
    return drafter


def _sequence(prompt: int = 20) -> Sequence:
    sequence = Sequence(make_request("a", prompt, max_tokens=100_000), 0, 0, 100_000)
    sequence.admit(0, 0, 0.0)
    return sequence


def _wanted(
    drafter: Drafter,
    num_right: int,
    call_s: float,
    steps: int,
    sequence: Sequence | None = None,
    is_right: Callable[[str], bool] = lambda source: True,
) -> list[int]:
    """After each of so many steps: how many drafts are wanted, of which so many are right, and a
    call for each takes call_s."""
    sequence, nums = sequence or _sequence(), []
    for _ in range(steps):
        (drafts,) = drafter.propose([sequence], [8], 100)
        wanted = drafter.want([sequence])
        nums.append(sum(wanted))
        num_accepted = 0
        if drafts:
            source = drafter._verified[sequence][-1].source
            num_accepted = min(len(drafts), num_right) if is_right(source) else 0
            drafter.judge(sequence, num_accepted)
        sequence.token_ids += [9] * (1 + num_accepted)
        proposed = {0: (5,) * wanted[0]} if wanted else {}
        sampled = SampledTokens(1, [9], proposed=proposed, proposing_s=call_s * nums[-1])
        drafter.hear([sequence], sampled)
    return nums


def test_cheap_proposals_that_are_right_are_wanted_up_to_the_most() -> None:
    assert _wanted(_drafter(), 6, 0.05 * STEP_S, 60)[-1] == 6


@pytest.mark.parametrize("most", [0, 2])
def test_no_more_are_wanted_than_the_request_allows(most: int) -> None:
    request = make_request("a", 20, max_tokens=100_000, max_drafts=most)
    sequence = Sequence(request, 0, 0, 100_000)
    sequence.admit(0, 0, 0.0)
    assert max(_wanted(_drafter(), 6, 0.05 * STEP_S, 400, sequence)) == most


def test_of_those_that_are_right_for_a_while_as_many_are_wanted_as_are_worth_it() -> None:
    assert 2 <= _wanted(_drafter(), 2, 0.05 * STEP_S, 200)[-1] <= 3


@pytest.mark.parametrize(("num_right", "call_share"), [(0, 0.02), (6, 1.0)])
def test_hopeless_or_dear_proposals_fall_silent_and_are_tried_ever_more_seldom(
    num_right: int, call_share: float
) -> None:
    nums = _wanted(_drafter(), num_right, call_share * STEP_S, 3000)
    assert sum(nums[:200]) > 0
    late = [step for step, num in enumerate(nums) if num and step > 400]
    assert all(nums[step] == 1 for step in late)
    tries = [step for step in late if not nums[step - 1]]
    assert 1 <= len(tries) <= 5 and len(late) <= 3 * len(tries)
    gaps = [b - a for a, b in pairwise(tries)]
    assert gaps == sorted(gaps)


def test_a_first_call_that_is_dear_is_not_taken_for_what_calls_cost() -> None:
    """The first one of each try finds nothing in the processor's caches."""
    drafter, sequence = _drafter(), _sequence()
    before = 0
    for _ in range(200):
        (drafts,) = drafter.propose([sequence], [8], 100)
        wanted = sum(drafter.want([sequence]))
        if drafts:
            drafter.judge(sequence, len(drafts))
        sequence.token_ids += [9] * (1 + len(drafts))
        call_s = (0.05 if before else 1.0) * STEP_S
        sampled = SampledTokens(
            1, [9], proposed={0: (5,) * wanted} if wanted else {}, proposing_s=call_s * wanted
        )
        drafter.hear([sequence], sampled)
        before = wanted
    assert before == 6


def test_one_wrong_row_of_drafts_does_not_silence_a_request() -> None:
    drafter, young = _drafter(), _sequence(prompt=10)
    _wanted(drafter, 6, 0.05 * STEP_S, 100)
    first, _, after_wrong_row = _wanted(drafter, 0, 0.05 * STEP_S, 3, young)
    assert first == 6 and after_wrong_row >= 3


def test_a_try_is_verified_so_that_proposals_which_become_right_are_found() -> None:
    drafter, sequence = _drafter(), _sequence()
    _wanted(drafter, 0, 0.02 * STEP_S, 300, sequence)
    nums = _wanted(drafter, 6, 0.02 * STEP_S, 9000, sequence)
    assert max(nums[-100:]) > 1


def test_where_another_source_is_better_nothing_is_wanted_of_the_model() -> None:
    drafter = _drafter(_Said())
    nums = _wanted(drafter, 6, 0.05 * STEP_S, 400, is_right=lambda source: source == "said")
    assert sum(nums[100:]) < 20
    drafter = _drafter(_Said())
    nums = _wanted(drafter, 6, 0.05 * STEP_S, 400, is_right=lambda source: source == "model")
    assert sum(nums[-20:]) > 60


def test_drafts_that_were_proposed_are_void_once_the_sequence_has_other_tokens() -> None:
    drafter, sequence = _drafter(share=0.0), _sequence()
    drafter.hear([sequence], SampledTokens(1, [9], proposed={0: (5, 6, 7)}))
    assert drafter.propose([sequence], [8], 100) == [(5, 6, 7)]
    sequence.token_ids.append(4)
    assert drafter.propose([sequence], [8], 100) == [()]


def test_a_long_prompt_is_caught_up_on_once_drafts_would_have_saved_as_much() -> None:
    begun = []
    for prompt in (20, 400, 4000):
        drafter = _drafter()
        _wanted(drafter, 6, 0.05 * STEP_S, 30)  # what calls take is known
        caught_up = SampledTokens(1, [9], proposing_s=50 * STEP_S, num_caught_up=1000)
        drafter.hear([_sequence()], caught_up)
        nums = _wanted(drafter, 6, 0.05 * STEP_S, 200, _sequence(prompt))
        begun.append(next(step for step, num in enumerate(nums) if num))
    assert begun[0] < begun[1] < begun[2] and begun[1] < 10


def test_none_are_wanted_in_steps_of_prompts_nor_while_one_waits() -> None:
    oracle = OracleProposer(1.0)
    drafter = EveryDraft([], most=4, proposes="model")
    driver = Driver(drafter=drafter, propose=oracle)
    requests = [make_request(name, 50, max_tokens=30) for name in "abc"]
    for request in requests:
        oracle.learn(request, [run_alone(request).tokens[request.id, 0]])
        driver.scheduler.add(request)
    driver.run()
    for batch in driver.batches:
        has_chunks = len(batch.slots) > batch.num_decodes
        assert not (batch.wanted_drafts and has_chunks)
        if batch.wanted_drafts:
            assert len(batch.wanted_drafts) == len(batch.slots)
    (_, stats) = drafter.stats
    assert stats.source == "model" and stats.num_accepted_tokens > 30
    for request in requests:
        assert driver.tokens[request.id, 0] == run_alone(request).tokens[request.id, 0]
    assert drafter._proposals is not None and not drafter._proposals._followed
