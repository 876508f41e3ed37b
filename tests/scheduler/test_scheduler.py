"""The scheduler's behaviour, seen through a paged executor that notices every misplaced block."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.cache.prefix import root_digest
from penstock.scheduler.config import Batching, Policy, SchedulerConfig
from penstock.scheduler.errors import ContextTooLong, DuplicateRequest, InvalidConfig, PromptTooLong
from penstock.scheduler.types import FinishReason, RequestId, SampledTokens
from tests.support.scheduling import Driver, make_request, tokens_alone


def test_a_request_ends_at_max_tokens_with_one_final_output() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 10, max_tokens=5))
    driver.run()
    assert len(driver.tokens["a", 0]) == 5
    assert [finish.reason for finish in driver.finishes["a", 0]] == [FinishReason.LENGTH]


def test_a_stop_token_ends_a_sequence_and_is_its_last_token() -> None:
    request = make_request("a", 10, max_tokens=6)
    stop = tokens_alone(request)["a", 0][3]
    driver = Driver()
    driver.scheduler.add(make_request("a", 10, max_tokens=6, stop_token_ids=(stop,)))
    driver.run()
    assert driver.tokens["a", 0] == tokens_alone(request)["a", 0][:4]
    assert driver.finishes["a", 0][0].reason is FinishReason.STOP
    assert driver.finishes["a", 0][0].stop_token_id == stop


def test_a_new_request_joins_at_the_next_step() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 10))
    driver.step()
    driver.step()
    driver.scheduler.add(make_request("b", 10))
    batch = driver.step()
    assert batch is not None
    assert batch.num_decodes == 1 and len(batch.slots) == 2


def test_prefill_chunks_and_decodes_share_the_token_budget() -> None:
    driver = Driver(config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16))
    for i, name in enumerate("abc"):
        driver.scheduler.add(make_request(name, [5 + i] * 30, max_tokens=12))
    driver.run()
    assert max(sum(batch.num_tokens) for batch in driver.batches) == 16
    assert any(batch.num_decodes and sum(batch.num_tokens) == 16 for batch in driver.batches)


def test_requests_run_in_order_of_arrival_under_fcfs() -> None:
    driver = Driver(config=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=32))
    for name, priority in (("a", 5), ("b", 0)):
        driver.scheduler.add(make_request(name, 8, priority=priority))
    driver.run()
    assert list(driver.finishes) == [("a", 0), ("b", 0)]


def test_requests_run_in_order_of_priority_under_priority() -> None:
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=32, policy=Policy.PRIORITY)
    driver = Driver(config=config)
    for name, priority in (("a", 5), ("b", 0), ("c", 0)):
        driver.scheduler.add(make_request(name, 8, priority=priority))
    driver.run()
    assert list(driver.finishes) == [("b", 0), ("c", 0), ("a", 0)]


def test_a_second_prompt_with_the_same_beginning_computes_only_what_differs() -> None:
    driver = Driver()
    shared = list(range(3, 27))
    driver.scheduler.add(make_request("a", [*shared, 99], max_tokens=2))
    driver.run()
    driver.scheduler.add(make_request("b", [*shared, 98], max_tokens=2))
    batch = driver.step()
    assert batch is not None
    assert batch.starts == (24,) and batch.num_tokens == (1,)
    driver.run()
    assert driver.num_cached["b", 0] == 24


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    driver = Driver()
    for name in "ab":
        driver.scheduler.add(make_request(name, 16, max_tokens=2))
        driver.run()
    assert driver.num_cached["b", 0] == 12
    assert driver.tokens["a", 0] == driver.tokens["b", 0]


def test_a_follow_up_finds_the_answer_of_the_turn_before() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 10, max_tokens=11))
    driver.run()
    prompt = [3 + i for i in range(10)] + driver.tokens["a", 0] + [7]
    driver.scheduler.add(make_request("b", prompt))
    driver.run()
    assert driver.num_cached["b", 0] == 20


def test_different_salts_share_nothing() -> None:
    driver = Driver()
    for name in "ab":
        driver.scheduler.add(make_request(name, 16, cache_salt=name))
        driver.run()
    assert driver.num_cached["b", 0] == 0


@pytest.mark.parametrize(
    ("first", "second", "num_cached"),
    [("a", "a", 12), ("a", "b", 0), ("a", None, 0), ("", None, 0), (None, None, 12)],
)
def test_requests_share_blocks_under_the_same_adapter_alone(
    first: str | None, second: str | None, num_cached: int
) -> None:
    driver = Driver()
    for name, adapter in (("x", first), ("y", second)):
        driver.scheduler.add(make_request(name, 16, adapter=adapter))
        driver.run()
    assert driver.num_cached["y", 0] == num_cached


def test_a_salt_cannot_stand_for_an_adapter() -> None:
    digests = {
        root_digest(salt, adapter) for salt in ("", "a", "ab") for adapter in ("", "b", None)
    }
    assert len(digests) == 9
    assert root_digest("\ud800", "a") != root_digest("\\ud800", "a")


def test_the_adapter_reaches_the_executor_with_its_sequence() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 5, adapter="french", n=2))
    driver.scheduler.add(make_request("b", 5))
    batches = [driver.step(), driver.step()]
    adapters = [entry.adapter for batch in batches if batch for entry in batch.assignments]
    assert adapters == ["french", None, "french"]


def test_prefix_caching_can_be_turned_off() -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, enable_prefix_caching=False)
    driver = Driver(config=config)
    for name in "ab":
        driver.scheduler.add(make_request(name, 16))
        driver.run()
    assert driver.num_cached["b", 0] == 0
    assert driver.kv.num_free == driver.kv.num_blocks


def test_samples_of_one_prompt_share_its_blocks_and_copy_on_write() -> None:
    driver = Driver(num_blocks=64)
    driver.scheduler.add(make_request("a", 30, n=4, temperature=1.0, max_tokens=6))
    driver.step()
    batch = driver.step()
    assert batch is not None
    assert len(batch.copies) == 3  # the 8th block holds two tokens of the prompt, and is written to
    assert driver.kv.num_used == 7 + 4
    driver.run()
    answers = {tuple(driver.tokens["a", index]) for index in range(4)}
    assert len(answers) == 4


def test_samples_have_the_ids_that_they_have_without_sharing() -> None:
    shared = Driver(num_blocks=64)
    shared.scheduler.add(make_request("a", 29, n=3, temperature=1.0, seed=7, max_tokens=9))
    shared.run()
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=32, enable_prefix_caching=False)
    alone = Driver(num_blocks=64, config=config)  # one slot: answer 0 ends before the next starts
    alone.scheduler.add(make_request("a", 29, n=3, temperature=1.0, seed=7, max_tokens=9))
    alone.run()
    assert shared.tokens == alone.tokens


def test_a_pool_too_small_for_all_preempts_and_changes_no_token() -> None:
    requests = [make_request(name, 20 + i, max_tokens=40) for i, name in enumerate("abcd")]
    driver = Driver(num_blocks=32)
    for request in requests:
        driver.scheduler.add(request)
    driver.run()
    assert driver.scheduler.stats().preemptions_total > 0
    for request in requests:
        assert driver.tokens[request.id, 0] == tokens_alone(request)[request.id, 0]


@pytest.mark.parametrize("is_cached", [True, False])
def test_recomputed_tokens_are_those_that_ran_twice(is_cached: bool) -> None:
    config = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=8, enable_prefix_caching=is_cached
    )
    driver = Driver(num_blocks=32, config=config)
    for i in range(6):
        driver.scheduler.add(make_request(str(i), [3 + i] * (20 + 9 * i), max_tokens=40))
    driver.run()
    in_slot: dict[int, int] = {}  # the first token identifies the sequence
    runs: list[tuple[int, int]] = []
    for batch in driver.batches:
        in_slot |= {entry.slot: entry.token_ids[0] for entry in batch.assignments}
        for slot, start, n in zip(batch.slots, batch.starts, batch.num_tokens, strict=True):
            runs += [(in_slot[slot], position) for position in range(start, start + n)]
    num_again = len(runs) - len(set(runs))
    assert num_again > 0
    assert driver.scheduler.stats().recomputed_tokens_total == num_again
    ends = [finish for finishes in driver.finishes.values() for finish in finishes]
    assert sum(finish.num_recomputed_tokens for finish in ends) == num_again


def test_the_cheapest_to_recompute_yields_first() -> None:
    driver = Driver(num_blocks=32)
    driver.scheduler.add(make_request("long", 60, max_tokens=60))
    driver.step()
    driver.step()
    driver.scheduler.add(make_request("short", [5] * 8, max_tokens=60))
    driver.run()
    assert driver.finishes["long", 0][0].num_preemptions == 0
    assert driver.finishes["short", 0][0].num_preemptions > 0


def test_the_least_important_yields_first_under_priority() -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, policy=Policy.PRIORITY)
    driver = Driver(num_blocks=32, config=config)
    driver.scheduler.add(make_request("long", 60, max_tokens=60, priority=1))
    driver.step()
    driver.step()
    driver.scheduler.add(make_request("short", [5] * 8, max_tokens=60, priority=0))
    driver.run()
    assert driver.finishes["short", 0][0].num_preemptions == 0
    assert driver.finishes["long", 0][0].num_preemptions > 0


def test_an_admission_leaves_each_running_decode_its_next_block() -> None:
    driver = Driver(num_blocks=32)
    driver.scheduler.add(make_request("a", 60, max_tokens=60))
    driver.step()  # uses 15 blocks of 32
    driver.scheduler.add(make_request("b", [5] * 66))  # wants all the 17 that are left
    driver.step()
    assert driver.scheduler.num_waiting == 1


def test_abort_returns_every_block_to_the_pool() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 30, n=3, max_tokens=50))
    driver.scheduler.add(make_request("b", 30, max_tokens=50))
    for _ in range(5):
        driver.step()
    driver.record(driver.scheduler.abort(RequestId("a")))
    driver.record(driver.scheduler.abort(RequestId("b")))
    assert driver.kv.num_used == 0 and not driver.scheduler.has_work
    assert {key for key, value in driver.finishes.items() if len(value) == 1} == {
        ("a", 0), ("a", 1), ("a", 2), ("b", 0)
    }  # fmt: skip


def test_one_answer_of_several_can_be_aborted() -> None:
    driver = Driver()
    request = make_request("a", 30, n=3, temperature=1.0)
    driver.scheduler.add(request)
    driver.record(driver.scheduler.abort(RequestId("a"), index=0))  # before it could fork
    driver.run()
    assert driver.tokens["a", 1] == tokens_alone(request)["a", 1]
    assert [f.reason for f in driver.finishes["a", 0]] == [FinishReason.ABORT]


def test_aborting_an_unknown_request_does_nothing() -> None:
    assert Driver().scheduler.abort(RequestId("nobody")) == []


def test_running_ahead_of_the_device_changes_no_token() -> None:
    requests = [make_request(name, 9 + i, max_tokens=9, n=2) for i, name in enumerate("abc")]
    driver = Driver(num_blocks=40)
    for request in requests:
        driver.scheduler.add(request)
    driver.launch()
    while driver.scheduler.has_work:
        driver.launch()
        driver.collect()
    for request in requests:
        for index in range(2):
            key = (request.id, index)
            assert driver.tokens[key] == tokens_alone(request)[key]


def test_an_end_that_comes_to_light_late_wastes_one_row_and_no_block() -> None:
    stop = tokens_alone(make_request("a", 10))["a", 0][2]
    driver = Driver()
    driver.scheduler.add(make_request("a", 10, stop_token_ids=(stop,), max_tokens=50))
    driver.launch()
    while driver.scheduler.has_work:
        driver.launch()
        driver.collect()
    assert len(driver.launched) == 1  # the wasted row is still in flight
    driver.collect()
    assert len(driver.tokens["a", 0]) == 3
    assert driver.kv.num_used == 0


def test_a_sequence_at_its_last_token_gets_no_row_while_that_is_in_flight() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 10, max_tokens=1))
    assert driver.launch() is not None
    assert driver.launch() is None


def test_static_batching_admits_none_until_the_batch_has_ended() -> None:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=32, batching=Batching.STATIC)
    driver = Driver(config=config)
    driver.scheduler.add(make_request("a", 8, max_tokens=4))
    assert driver.step() is None  # it waits for a full batch
    driver.scheduler.add(make_request("b", 8, max_tokens=12))
    driver.scheduler.add(make_request("c", 8, max_tokens=4))
    while ("b", 0) not in driver.finishes:
        assert driver.step() is not None
        assert driver.scheduler.num_waiting == 1
    assert driver.step() is None
    driver.now = 1.0  # and gives up waiting for a full one
    assert driver.step() is not None


def test_dynamic_batching_leaves_when_its_oldest_request_has_waited() -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, batching=Batching.DYNAMIC)
    driver = Driver(config=config)
    driver.scheduler.add(make_request("a", 8))
    assert driver.step() is None
    driver.now = 0.05
    assert driver.step() is not None


@pytest.mark.parametrize("batching", list(Batching))
def test_every_batching_gives_the_same_tokens(batching: Batching) -> None:
    config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16, batching=batching)
    driver = Driver(num_blocks=33, config=config)
    requests = [make_request(c, 11 + 5 * i, max_tokens=20, n=2) for i, c in enumerate("abcd")]
    for request in requests:
        driver.scheduler.add(request)
    driver.run()
    for request in requests:
        assert driver.tokens[request.id, 1] == tokens_alone(request)[request.id, 1]


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(PromptTooLong, match=r"128 tokens.*128 tokens"):
        Driver(max_model_len=128).scheduler.add(make_request("a", 128))


def test_a_prompt_and_its_output_beyond_the_context_are_refused() -> None:
    with pytest.raises(ContextTooLong, match=r"100 tokens.*29.*129.*128"):
        Driver(max_model_len=128).scheduler.add(make_request("a", 100, max_tokens=29))


def test_an_id_in_use_is_refused() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 4))
    with pytest.raises(DuplicateRequest):
        driver.scheduler.add(make_request("a", 5))


def test_a_pool_that_cannot_hold_one_sequence_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="--max-model-len"):
        Driver(num_blocks=31, block_size=4, max_model_len=128)


def test_a_result_out_of_order_is_an_error_of_ours() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 4))
    driver.launch()
    with pytest.raises(AssertionError, match="results of step 1, not 7"):
        driver.scheduler.update(SampledTokens(step=7, token_ids=[3]))


@given(
    chunk=st.integers(2, 40),
    num_blocks=st.integers(32, 70),
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    n=st.integers(1, 3),
    ahead=st.booleans(),
)
def test_ids_are_the_same_with_and_without_chunks_preemption_and_other_rows(
    chunk: int, num_blocks: int, prompts: list[int], n: int, ahead: bool
) -> None:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=chunk)
    driver = Driver(num_blocks=num_blocks, config=config)
    requests = [make_request(str(i), p, n=n, max_tokens=30) for i, p in enumerate(prompts)]
    for request in requests:
        driver.scheduler.add(request)
    if ahead:
        driver.launch()
    while driver.scheduler.has_work:
        driver.launch()
        driver.collect()
    for request in requests:
        for index in range(n):
            key = (request.id, index)
            assert driver.tokens[key] == tokens_alone(request)[key]


def test_a_sequence_that_failed_after_its_preemption_leaves_no_findable_block() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 30))
    driver.launch()
    (sequence,) = driver.scheduler._decoding
    driver.scheduler._preempt(sequence)
    assert driver.kv.num_evictable == 7
    sampled = driver.launched.popleft().wait()
    sampled = sampled._replace(failed={0: FinishReason.INVALID_LOGITS})
    driver.record(driver.scheduler.update(sampled))
    assert driver.finishes["a", 0][0].reason is FinishReason.INVALID_LOGITS
    assert driver.kv.num_free == driver.kv.num_blocks
