"""The outputs of prompts, and requests that want nothing else: on the scripted executor."""

from dataclasses import replace

import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.executors.scripted import HIDDEN_SIZE, scripted_info
from penstock.engine.ipc.client import EngineClient
from penstock.scheduler.batch import work_of
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import PromptTooLong
from penstock.scheduler.prompt_logprobs import PackedLogprobs
from penstock.scheduler.types import FinishReason, Pooling, PromptOutput, Request, RequestId
from tests.support.paths import DEMO_MODEL
from tests.support.scheduling import Driver, make_request, run_alone


def prompt_output(driver: Driver, name: str) -> PromptOutput:
    """The outputs of a prompt, which must have come once."""
    (prompt,) = driver.prompts[name]
    return prompt


def prompt_output_alone(request: Request) -> PromptOutput:
    return prompt_output(run_alone(request), request.id)


def test_max_tokens_0_ends_with_the_prompt_and_one_output() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 70, max_tokens=0))
    driver.run()
    assert [batch.samples for batch in driver.batches] == [(False,)] * 3
    (finish,) = driver.finishes["a", 0]
    assert finish.reason is FinishReason.LENGTH
    assert driver.tokens["a", 0] == []
    assert driver.kv.num_used == 0 and not driver.scheduler.num_running


def test_with_max_tokens_0_all_answers_end_and_one_of_them_has_run() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 20, max_tokens=0, n=3, num_prompt_logprobs=0))
    driver.run()
    assert sum(sum(batch.num_tokens) for batch in driver.batches) == 20
    for index in range(3):
        (finish,) = driver.finishes["a", index]
        assert finish.reason is FinishReason.LENGTH
    assert len(prompt_output(driver, "a").logprobs or []) == 19


def test_other_answers_run_by_themselves_where_answer_0_of_max_tokens_0_was_aborted() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 20, max_tokens=0, n=3))
    driver.record(driver.scheduler.abort(RequestId("a"), 0))
    driver.run()
    reasons = [driver.finishes["a", index][0].reason for index in range(3)]
    assert reasons == [FinishReason.ABORT, FinishReason.LENGTH, FinishReason.LENGTH]


def test_a_prompt_may_fill_the_context_where_max_tokens_is_0() -> None:
    driver = Driver(max_model_len=128)
    driver.scheduler.add(make_request("a", 128, max_tokens=0, num_prompt_logprobs=1))
    driver.run()
    assert len(prompt_output(driver, "a").logprobs or []) == 127
    with pytest.raises(PromptTooLong, match=r"129 tokens.* is 128 tokens; shorten"):
        driver.scheduler.add(make_request("b", 129, max_tokens=0))


def test_prompt_outputs_come_with_the_first_token_however_many_chunks_the_prompt_took() -> None:
    driver = Driver()
    request = make_request("a", 100, max_tokens=3, num_prompt_logprobs=2)
    driver.scheduler.add(request)
    for _ in range(3):
        driver.step()
    assert not driver.prompts and not driver.tokens["a", 0]
    driver.step()
    assert len(prompt_output(driver, "a").logprobs or []) == 99
    assert len(driver.tokens["a", 0]) == 1
    driver.run()
    assert prompt_output(driver, "a") == prompt_output_alone(request)


def test_the_scripts_own_choice_has_rank_1_and_every_other_id_its_distance() -> None:
    answer = run_alone(make_request("a", 12, max_tokens=3)).tokens["a", 0]
    prompt = [*make_request("a", 12).prompt_token_ids, *answer[:2], answer[2] + 5]
    entries = prompt_output_alone(
        make_request("a", prompt, max_tokens=0, num_prompt_logprobs=2)
    ).logprobs
    assert entries is not None
    assert [(entry.rank, entry.logprob) for entry in entries[-3:]] == [(1, 0), (1, 0), (6, -5)]
    assert entries[-1:][0].top == ((answer[2], 0.0), (answer[2] + 1, -1.0))


def test_logprobs_of_a_prompt_of_one_token_are_none_at_all() -> None:
    prompt = prompt_output_alone(make_request("a", 1, max_tokens=0, num_prompt_logprobs=2))
    assert prompt == PromptOutput(PackedLogprobs(), embedding=None)


@pytest.mark.parametrize(
    ("num_prompt_logprobs", "pooling"), [(0, None), (None, Pooling.MEAN), (1, Pooling.LAST)]
)
def test_a_request_for_prompt_outputs_does_not_read_the_cache_but_fills_it(
    num_prompt_logprobs: int | None, pooling: Pooling | None
) -> None:
    driver = Driver()
    wanting = make_request(
        "b", 40, max_tokens=1, num_prompt_logprobs=num_prompt_logprobs, pooling=pooling
    )
    for request in (make_request("a", 40), wanting, make_request("c", 40)):
        driver.scheduler.add(request)
        driver.run()
    assert driver.num_cached == {("a", 0): 0, ("b", 0): 0, ("c", 0): 36}
    assert prompt_output(driver, "b") == prompt_output_alone(wanting)
    assert driver.scheduler.stats().prefix_query_tokens_total == 80


def test_a_prompt_with_outputs_leaves_its_blocks_in_the_cache() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 40, max_tokens=0, num_prompt_logprobs=0))
    driver.run()
    driver.scheduler.add(make_request("b", 40))
    driver.run()
    assert driver.num_cached["b", 0] == 36


def test_the_last_tokens_state_is_the_same_after_a_cached_prefix() -> None:
    driver = Driver()
    request = make_request("a", 40, max_tokens=0, pooling=Pooling.LAST)
    for name in "ab":
        driver.scheduler.add(replace(request, id=RequestId(name)))
        driver.run()
    assert driver.num_cached["b", 0] == 36
    assert prompt_output(driver, "a") == prompt_output(driver, "b")
    assert len(prompt_output(driver, "a").embedding or b"") == 4 * HIDDEN_SIZE


def test_mean_and_first_and_last_differ_unless_the_prompt_is_one_token() -> None:
    for length, is_equal in ((1, True), (2, False)):
        last, mean, first = (
            prompt_output_alone(make_request("a", length, max_tokens=0, pooling=pooling))
            for pooling in Pooling
        )
        assert (last == mean) is (last == first) is is_equal


def test_a_preempted_prompt_is_read_again_from_its_beginning_and_returned_once() -> None:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=4)
    driver = Driver(num_blocks=32, block_size=4, config=config)
    driver.scheduler.add(make_request("a", 30, max_tokens=60))
    request = make_request("b", 68, num_prompt_logprobs=1, pooling=Pooling.MEAN)
    while len(driver.tokens["a", 0]) < 20:
        driver.step()
    driver.scheduler.add(request)
    driver.run()
    assert driver.finishes["b", 0][0].num_preemptions > 0
    assert prompt_output(driver, "b") == prompt_output_alone(request)


def test_a_sequence_preempted_after_its_prompt_outputs_may_use_the_cache() -> None:
    driver = Driver(num_blocks=32, block_size=4)
    requests = [make_request(n, 40, max_tokens=50, num_prompt_logprobs=0) for n in "ab"]
    for request in requests:
        driver.scheduler.add(request)
    driver.run()
    (preempted,) = (n for n in "ab" if driver.finishes[n, 0][0].num_preemptions)
    assert len(prompt_output(driver, preempted).logprobs or []) == 39
    assert driver.finishes[preempted, 0][0].num_recomputed_tokens < 40


def test_a_request_aborted_while_its_prompts_end_is_in_flight_gets_no_prompt_outputs() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 10, max_tokens=0, n=2, num_prompt_logprobs=0))
    driver.launch()
    driver.record(driver.scheduler.abort(RequestId("a")))
    driver.collect()
    assert not driver.prompts
    assert len(driver.finishes) == 2 and not driver.scheduler.has_work


def test_running_ahead_ends_a_request_without_answer_after_its_one_step() -> None:
    driver = Driver()
    driver.scheduler.add(make_request("a", 10, max_tokens=0, num_prompt_logprobs=0))
    driver.launch()
    assert driver.launch() is None
    driver.collect()
    assert len(prompt_output(driver, "a").logprobs or []) == 9
    assert not driver.scheduler.has_work


def test_every_prompt_token_but_the_last_is_counted_as_one_more_row_of_the_output_layer() -> None:
    info = replace(scripted_info(), flops_per_sampled_token=1)
    driver = Driver()
    driver.scheduler.add(make_request("a", 100, max_tokens=2, num_prompt_logprobs=0))
    driver.scheduler.add(make_request("b", 10, max_tokens=2, pooling=Pooling.MEAN))
    driver.run()
    works = [work_of(batch, info.windows) for batch in driver.batches]
    assert [work.num_scored for work in works[:4]] == [32, 22, 31, 14]
    assert sum(info.step_flops(work) for work in works) == 99 + 4


async def test_prompt_outputs_come_from_the_engine_process_once() -> None:
    client = EngineClient(EngineConfig(model=str(DEMO_MODEL), scripted=True))
    info = await client.start()
    request = make_request("a", 40, max_tokens=3, n=2, num_prompt_logprobs=2, pooling=Pooling.MEAN)
    outputs = [output async for part in client.submit(request) for output in part]
    await client.close()
    (prompt,) = [output.prompt for output in outputs if output.prompt]
    assert outputs[0].prompt is prompt and outputs[0].index == 0
    assert isinstance(prompt, PromptOutput) and prompt.logprobs
    assert len(prompt.logprobs) == 39 and len(prompt.logprobs[:1][0].top) == 2
    assert len(prompt.embedding or b"") == 4 * info.hidden_size
