"""Where drafts are found, and how many are worth their time."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.executors.scripted import scripted_info
from penstock.scheduler.batch import work_of
from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.drafts.drafter import Drafter
from penstock.scheduler.drafts.prices import DraftPrices, Price
from penstock.scheduler.drafts.sources import (
    MOST_MATCH,
    FinishedAnswers,
    Found,
    OwnText,
)
from penstock.scheduler.stats import DraftStats, SchedulerStats, plus_counters
from penstock.scheduler.types import ScheduledBatch
from tests.support.drafting import EveryDraft
from tests.support.scheduling import Driver, make_request

TOKENS = st.lists(st.integers(0, 2), max_size=60)


def _sequence(prompt: list[int], answer: Iterable[int] = (), **fields: str) -> Sequence:
    request = make_request("a", prompt, max_tokens=100, **fields)  # type: ignore[arg-type]
    sequence = Sequence(request, 0, 0, 200)
    sequence.token_ids += answer
    return sequence


@given(TOKENS.filter(bool), TOKENS)
def test_drafts_follow_what_the_last_tokens_were_followed_by(
    prompt: list[int], answer: list[int]
) -> None:
    own, sequence = OwnText(), _sequence(prompt)
    for token in answer:
        sequence.token_ids.append(token)
        found = own.find(sequence)
        text = sequence.token_ids
        runs = {tuple(text[i - 3 : i]) for i in range(3, len(text))}
        assert (found is not None) >= (tuple(text[-3:]) in runs)
        if found:
            assert found.text is text and 0 < found.at < len(text) and found.match
            assert text[found.at - found.match : found.at] == text[len(text) - found.match :]


def test_what_was_followed_goes_on_being_followed_beside_a_later_place_of_the_same_words() -> None:
    first, again = [5, 1, 2, 3, 40, 41], [1, 2, 3, 50]
    sequence = _sequence([*first, *again, 9, 5])
    own = OwnText()
    assert own.find(sequence) is None
    sequence.token_ids += [1, 2, 3]
    found = own.find(sequence)
    assert found and sequence.token_ids[found.at] == 50  # the latest place of three tokens
    follower = OwnText()
    sequence = _sequence([7, 8, 5, 1, 2, 3, 40, 41, 42, *again, 9, 7, 8, 5])
    assert (found := follower.find(sequence)) and found.at == 3
    for token in (1, 2, 3):
        sequence.token_ids.append(token)
        found = follower.find(sequence)
    assert found and sequence.token_ids[found.at] == 40


def test_answers_are_found_by_the_same_tenant_and_salt_alone() -> None:
    answers = FinishedAnswers()
    answers.end(_sequence([1], [10, 11, 12, 13, 14], tenant="a", cache_salt="s"))
    for tenant, salt, is_found in (("a", "s", True), ("b", "s", False), ("a", "t", False)):
        sequence = _sequence([10, 11, 12], tenant=tenant, cache_salt=salt)
        assert (answers.find(sequence) is not None) == is_found


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 3), max_size=30)), max_size=30
    )
)
def test_finished_answers_take_bounded_memory_and_the_oldest_go(
    ended: list[tuple[str, list[int]]],
) -> None:
    answers = FinishedAnswers(max_of_tenant=40, max_of_all=70)
    for tenant, answer in ended:
        answers.end(_sequence([9], answer, tenant=tenant))
        kept = answers._answers.values()
        assert answers.num_tokens == sum(each.num_tokens for each in kept) <= 70
        for each in kept:
            assert 0 < each.num_tokens <= 40
            texts = [id(text) for text in each._texts]
            places = each.places._place_of.values()
            assert all(id(text) in texts for text, _ in places)
        if len(answer) > 3:
            assert answers.find(_sequence(answer[:3], tenant=tenant))


class Said:
    """A source whose drafts are always these."""

    name = "said"

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids, self.num_asked = token_ids, 0

    def find(self, sequence: Sequence) -> Found:
        self.num_asked += 1
        return Found(self.token_ids, 0, MOST_MATCH)

    def end(self, sequence: Sequence) -> None:
        pass


class Priced(DraftPrices):
    """A draft costs this share of a step."""

    def __init__(self, share: float) -> None:
        super().__init__(None)
        self.share = share

    def of(self, num_decodes: int, num_positions: int) -> Price:
        return Price(1.0, self.share)


def _drafter(share: float, most: int = 8) -> Drafter:
    drafter = Drafter([Said([5] * 8)], most)
    drafter._prices = Priced(share)
    return drafter


def _taught(drafter: Drafter, num_accepted: int, *, steps: int = 60) -> tuple[Sequence, list[int]]:
    """How many drafts it takes in each of these steps, where so many of them are right."""
    sequence, nums = _sequence([1, 2, 3]), []
    for _ in range(steps):
        (drafts,) = drafter.propose([sequence], [8], 100)
        nums.append(len(drafts))
        if drafts:
            drafter.judge(sequence, min(num_accepted, len(drafts)))
    return sequence, nums


def test_drafts_that_are_right_are_taken_up_to_the_most() -> None:
    _, nums = _taught(_drafter(0.1), 8)
    assert nums[-1] == 8


def test_of_drafts_that_are_right_for_a_while_as_many_are_taken_as_are_worth_it() -> None:
    _, nums = _taught(_drafter(0.1), 2)
    assert 2 <= nums[-1] <= 3


@pytest.mark.parametrize("share", [0.3, 0.05])
def test_hopeless_drafts_fall_silent_and_are_tried_again_seldom(share: float) -> None:
    drafter = _drafter(share)
    _, nums = _taught(drafter, 0, steps=600)
    assert sum(nums[:40]) > 0
    assert sum(nums[300:]) <= 4  # one in 128 tokens


def test_where_a_draft_costs_as_much_as_a_row_of_a_full_step_none_is_taken() -> None:
    drafter = _drafter(1 / 32)
    sequences = [_sequence([1, 2, 3]) for _ in range(32)]
    assert not any(drafter.propose(sequences, [8] * 32, 100))
    # And one sequence alone has them.
    assert any(drafter.propose(sequences[:1], [8], 100))


def test_where_the_likeliest_draft_would_not_pay_none_is_looked_for_but_to_try_one() -> None:
    said, sequences = Said([5] * 8), [_sequence([1, 2, 3]) for _ in range(8)]
    drafter = Drafter([said], 8)
    drafter._prices = Priced(1 / 8)
    for _ in range(160):  # 1,280 tokens, and a try after each 128 of them
        for sequence, drafts in zip(
            sequences, drafter.propose(sequences, [8] * 8, 100), strict=True
        ):
            if drafts:
                drafter.judge(sequence, 0)
    assert 8 <= said.num_asked / len(sequences) <= 10
    assert not drafter.may_pay(sequences) and drafter.may_pay(sequences[:1])


@pytest.mark.parametrize(("share", "is_asked"), [(0.05, True), (0.7, False)])
def test_what_grammars_force_is_asked_for_where_a_draft_may_pay(
    share: float, is_asked: bool
) -> None:
    driver = Driver(drafter=_drafter(share))
    driver.scheduler.add(make_request("a", 4, max_tokens=2))
    batch = driver.scheduler.schedule(0.0)
    assert batch and batch.wants_forced is is_asked


def test_a_request_has_as_many_drafts_as_it_allows_beside_others() -> None:
    drafter = EveryDraft([Said([5] * 8)], 6)
    driver = Driver(drafter=drafter)
    for name, most in (("none", 0), ("few", 2), ("more", 40), ("all", None)):
        driver.scheduler.add(make_request(name, [3, 4, 5], max_tokens=30, max_drafts=most))
    driver.run()
    found = {len(batch.drafts) and tuple(map(len, batch.drafts)) for batch in driver.batches[1:9]}
    assert found == {(0, 2, 6, 6)}


def test_a_step_has_no_more_drafts_than_tokens_are_left() -> None:
    drafter = _drafter(0.0)
    sequences = [_sequence([1, 2, 3]) for _ in range(4)]
    drafts = drafter.propose(sequences, [8, 2, 0, 8], 11)
    assert sum(map(len, drafts)) <= 11
    assert len(drafts[1]) <= 2 and not drafts[2]


def test_a_sequence_that_ends_is_forgotten() -> None:
    drafter = Drafter([OwnText(), FinishedAnswers()], 4)
    driver = Driver(drafter=drafter)
    for name in "abc":
        driver.scheduler.add(make_request(name, [3, 4, 5, 6, 3, 4, 5, 6], max_tokens=20))
    driver.run()
    _, own, finished = drafter._sources
    assert not own._known and not finished._followers  # type: ignore[attr-defined]
    assert not drafter._rate_of and not drafter._verified


def test_a_step_with_drafts_counts_their_tokens_and_what_they_attend_to() -> None:
    batch = ScheduledBatch(1, (), (), (), (0, 1), (9, 4), (3, 1), (True, True), 2)
    batch = batch._replace(drafts=((7, 7), ()))
    work = work_of(batch, (None, 4))
    assert (work.num_decode_tokens, work.num_sampled, work.num_sequences) == (4, 4, 2)
    whole, windowed = work.attention
    assert whole.context_tokens == whole.decode_context_tokens == 12 + 5
    assert whole.pairs == 10 + 11 + 12 + 5
    assert windowed.pairs == 4 * 4
    info = replace(scripted_info(), flops_per_token=1)
    assert info.amounts(work_of(batch, (None,))).tokens == 4


def test_counters_of_drafts_go_on_after_a_restart() -> None:
    before = SchedulerStats(drafts=(DraftStats("ngram", 2, 9, (2, 1)), DraftStats("suffix")))
    now = SchedulerStats(drafts=(DraftStats("ngram", 1, 3, (1, 1, 1)), DraftStats("suffix", 1, 1)))
    summed = plus_counters(now, before)
    assert summed.drafts == (DraftStats("ngram", 3, 12, (3, 2, 1)), DraftStats("suffix", 1, 1))
    assert plus_counters(SchedulerStats(), before).drafts == before.drafts
