"""Speculative decoding: decode rows with drafts, and several accepted ids for one row."""

import pytest

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.stats import work_of
from penstock.scheduler.types import (
    AcceptedDraft,
    FinishReason,
    SampledTokens,
    ScheduledBatch,
    TokenLogprobs,
)
from tests.support.scheduling import Driver, make_request, tokens_alone


class Hand:
    """A scheduler whose executor is the test: blocks of 4 tokens, and requests it adds."""

    def __init__(self, *, num_blocks: int = 16, max_num_batched_tokens: int = 32) -> None:
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=max_num_batched_tokens)
        self.driver = Driver(num_blocks=num_blocks, max_model_len=64, config=config)
        self.scheduler = self.driver.scheduler

    def schedule(self) -> ScheduledBatch:
        batch = self.scheduler.schedule(0.0)
        assert batch is not None
        return batch

    def update(
        self,
        batch: ScheduledBatch,
        *token_ids: int,
        accepted: dict[int, list[AcceptedDraft]] | None = None,
        num_drafts: dict[int, int] | None = None,
        logprobs: list[TokenLogprobs | None] | None = None,
        failed: dict[int, FinishReason] | None = None,
    ) -> None:
        sampled = SampledTokens(
            step=batch.step,
            token_ids=list(token_ids),
            accepted=accepted or {},
            num_drafts=num_drafts or {},
            logprobs=logprobs,
            failed=failed or {},
        )
        self.driver.record(self.scheduler.update(sampled))

    def prefill(self, num_drafts: int, **request: object) -> None:
        """One request of 5 tokens whose first id is 50, followed by num_drafts drafts."""
        self.scheduler.add(make_request("a", 5, **request))  # type: ignore[arg-type]
        self.update(self.schedule(), 50, num_drafts={0: num_drafts})


def drafts(*token_ids: int) -> list[AcceptedDraft]:
    return [AcceptedDraft(token_id) for token_id in token_ids]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_without_drafts_in_fewer_steps(temperature: float) -> None:
    requests = [
        make_request(str(i), 5 + 3 * i, max_tokens=40, temperature=temperature, seed=i, n=1 + i % 2)
        for i in range(4)
    ]
    driver = Driver(drafts=True)
    for request in requests:
        driver.scheduler.add(request)
    driver.run()
    for request in requests:
        for key, tokens in tokens_alone(request).items():
            assert driver.tokens[key] == tokens and len(tokens) == 40
    assert len(driver.batches) < 35
    lengths = {n for batch in driver.batches for n in batch.num_tokens[: batch.num_decodes]}
    assert lengths == {1, 2, 3, 4, 5}
    assert driver.kv.num_used == 0


def test_a_row_with_drafts_continues_after_the_last_accepted_one() -> None:
    hand = Hand()
    hand.prefill(3)
    batch = hand.schedule()
    assert (batch.starts, batch.num_tokens, batch.num_decodes) == ((5,), (4,), 1)
    assert [update.index for update in batch.table_updates] == [2]  # positions 5 to 8
    hand.update(batch, 60, accepted={0: drafts(51, 52)})
    assert hand.driver.tokens["a", 0] == [50, 51, 52, 60]
    batch = hand.schedule()
    assert (batch.starts, batch.num_tokens) == ((8,), (1,))


def test_rejected_drafts_give_their_blocks_back() -> None:
    hand = Hand()
    hand.prefill(8, max_tokens=20)
    batch = hand.schedule()
    assert batch.num_tokens == (9,) and hand.driver.kv.num_used == 4
    hand.update(batch, 60, accepted={0: drafts(51)})
    assert hand.driver.kv.num_used == 2  # 7 tokens are computed
    batch = hand.schedule()
    assert (batch.starts, batch.table_updates) == ((7,), ())
    hand.update(batch, 61)
    assert hand.schedule().table_updates[0].index == 2


def test_accepted_ids_fill_blocks_that_a_follow_up_finds() -> None:
    hand = Hand()
    hand.prefill(5, max_tokens=7)
    hand.update(hand.schedule(), 60, accepted={0: drafts(51, 52, 53, 54, 55)})
    assert hand.driver.finishes["a", 0][0].reason is FinishReason.LENGTH
    hand.scheduler.add(make_request("b", [3, 4, 5, 6, 7, 50, 51, 52, 53, 54, 55, 60]))
    assert hand.schedule().starts == (8,)


@pytest.mark.parametrize(("stop", "kept"), [(51, [50, 51]), (52, [50, 51, 52]), (60, None)])
def test_a_stop_token_among_the_accepted_ids_ends_the_answer(
    stop: int, kept: list[int] | None
) -> None:
    hand = Hand()
    hand.prefill(3, stop_token_ids=(stop,))
    hand.update(hand.schedule(), 60, accepted={0: drafts(51, 52, 53)})
    assert hand.driver.tokens["a", 0] == (kept or [50, 51, 52, 53, 60])
    (finish,) = hand.driver.finishes["a", 0]
    assert (finish.reason, finish.stop_token_id) == (FinishReason.STOP, stop)
    assert hand.driver.kv.num_used == 0


@pytest.mark.parametrize("max_tokens", [2, 3, 4])
def test_no_row_is_longer_than_max_tokens_allows(max_tokens: int) -> None:
    hand = Hand()
    hand.prefill(6, max_tokens=max_tokens)
    batch = hand.schedule()
    assert batch.num_tokens == (max_tokens - 1,)
    accepted = {0: drafts(51, 52)[: max_tokens - 2]}
    hand.update(batch, 60, accepted=accepted)
    assert len(hand.driver.tokens["a", 0]) == max_tokens
    assert hand.driver.finishes["a", 0][0].reason is FinishReason.LENGTH


def test_logprobs_run_parallel_to_the_accepted_ids() -> None:
    hand = Hand()
    hand.prefill(2, num_logprobs=0)
    entries = [TokenLogprobs(-float(i), ()) for i in range(3)]
    accepted = {0: [AcceptedDraft(51, entries[0]), AcceptedDraft(52, entries[1])]}
    hand.update(hand.schedule(), 60, accepted=accepted, logprobs=[entries[2]])
    assert hand.driver.logprobs["a", 0] == entries


def test_logprobs_end_with_the_stop_token() -> None:
    hand = Hand()
    hand.prefill(2, num_logprobs=0, stop_token_ids=(51,))
    entries = [TokenLogprobs(-float(i), ()) for i in range(3)]
    accepted = {0: [AcceptedDraft(51, entries[0]), AcceptedDraft(52, entries[1])]}
    hand.update(hand.schedule(), 60, accepted=accepted, logprobs=[entries[2]])
    assert hand.driver.logprobs["a", 0] == entries[:1]


def test_drafts_take_what_the_token_budget_leaves() -> None:
    hand = Hand(max_num_batched_tokens=8)
    for name in "abc":
        hand.scheduler.add(make_request(name, 2, max_tokens=20))
    hand.update(hand.schedule(), 50, 50, 50, num_drafts={0: 3, 2: 9})
    assert hand.schedule().num_tokens == (4, 1, 3)


def test_drafts_use_free_blocks_and_cause_no_preemption() -> None:
    hand = Hand(num_blocks=16, max_num_batched_tokens=64)
    hand.scheduler.add(make_request("a", 56, max_tokens=8))
    hand.scheduler.add(make_request("b", [7, 8], max_tokens=20))
    hand.update(hand.schedule(), 50, 50)
    hand.update(hand.schedule(), 51, 51, num_drafts={0: 9, 1: 9})
    assert (hand.driver.kv.num_used, hand.driver.kv.num_free) == (16, 0)
    batch = hand.schedule()
    assert (batch.starts, batch.num_tokens) == ((57, 3), (3, 1))
    assert hand.scheduler.stats().preemptions_total == 0


def test_a_sequence_whose_verification_is_in_flight_skips_the_next_step() -> None:
    hand = Hand()
    hand.prefill(2)
    hand.scheduler.add(make_request("b", 5))
    first = hand.schedule()
    assert first.num_tokens == (3, 1)  # its first block is found
    ahead = hand.schedule()  # one step ahead: the length of a is not known
    assert ahead.slots == (first.slots[1],)
    hand.update(first, 60, 70, accepted={0: drafts(51, 52)}, num_drafts={0: 1, 1: 1})
    hand.update(ahead, 71)
    last = hand.schedule()
    assert (last.starts, last.num_tokens) == ((8, 6), (2, 1)), "b's drafts are out of date"


def test_a_sequence_preempted_amid_a_verification_keeps_the_accepted_ids() -> None:
    request = make_request("a", 5, max_tokens=30)
    for seed in range(6):
        driver = Driver(num_blocks=10, max_model_len=40, drafts=True)
        driver.scheduler.add(request)
        driver.scheduler.add(make_request("b", 9, max_tokens=30, seed=seed, temperature=1.0))
        driver.run()
        assert driver.tokens["a", 0] == tokens_alone(request)["a", 0]


def test_an_aborted_or_failed_verification_frees_everything() -> None:
    hand = Hand()
    hand.prefill(4)
    batch = hand.schedule()
    hand.driver.record(hand.scheduler.abort(make_request("a", 5).id))
    hand.update(batch, 60, accepted={0: drafts(51)})
    assert hand.driver.tokens["a", 0] == [50] and hand.driver.kv.num_used == 0
    hand.prefill(4)
    hand.update(hand.schedule(), 60, accepted={0: drafts(51)}, failed={0: FinishReason.ERROR})
    assert hand.driver.finishes["a", 0][1].reason is FinishReason.ERROR
    assert not hand.scheduler.has_work and hand.driver.kv.num_used == 0


def test_more_accepted_ids_than_drafts_are_our_own_fault() -> None:
    hand = Hand()
    hand.prefill(1)
    with pytest.raises(AssertionError, match="2 of 1 drafts"):
        hand.update(hand.schedule(), 60, accepted={0: drafts(51, 52)})


def test_the_work_of_a_step_counts_its_drafts() -> None:
    hand = Hand()
    hand.prefill(2)
    work = work_of(hand.schedule(), windows=(None, 7))
    assert (work.num_decode_tokens, work.num_sampled, work.num_sequences) == (3, 3, 1)
    whole, windowed = work.attention
    assert (whole.context_tokens, whole.pairs) == (8, 6 + 7 + 8)
    assert (windowed.context_tokens, windowed.pairs) == (8, 6 + 7 + 7)
