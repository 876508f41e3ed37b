"""The cases of a comparison, as they are typed and as they are sent."""

import pytest

from penstock.loadtest.workload.config import PromptFormat
from penstock.loadtest.workload.workload import make_requests
from penstock.scheduler.errors import InvalidConfig
from tests.bench.in_turns.cases import parse_cases


def test_a_case_names_lengths_concurrency_and_requests() -> None:
    first, second = parse_cases("128x64@32, 1024x1@1:n=3")
    assert (first.input_len, first.output_len, first.concurrency) == (128, 64, 32)
    assert (first.num_shared, first.num_requests) == (0, 64)
    assert (second.name, second.output_len, second.num_requests) == ("1024x1@1:n=3", 1, 3)


def test_prompts_have_the_length_of_the_case_and_begin_with_what_is_shared() -> None:
    (case,) = parse_cases("24x5@2:shared=16:n=4")
    requests = make_requests(case.workload(7, PromptFormat.IDS))
    assert len(requests) == 2 + 4  # two of them warm up
    prompts = [request.prompt for request in requests]
    assert {len(prompt) for prompt in prompts} == {24}
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 1
    assert len({tuple(prompt[16:]) for prompt in prompts}) == 6
    assert {request.max_tokens for request in requests} == {5}


def test_a_conversation_has_new_tokens_for_each_turn() -> None:
    (case,) = parse_cases("24x5@2:turns=3")
    assert case.num_requests == 4 and case.num_output_tokens == 4 * 3 * 5
    warm_up, measured = case.conversations(make_requests(case.workload(7, PromptFormat.IDS)))
    assert [len(turns) for turns in warm_up] == [2, 2]
    assert [len(turns) for turns in measured] == [3, 3, 3, 3]
    added = [turn.prompt for turns in warm_up + measured for turn in turns]
    assert {len(each) for each in added} == {24}
    assert len({tuple(each) for each in added}) == len(added)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("128x64", "write IN x OUT @ CONCURRENCY"),
        ("", "write IN x OUT @ CONCURRENCY"),
        ("8x8@0", "each number must be at least 1"),
        ("8x8@1:n=0", "each number must be at least 1"),
        ("8x8@1:shard=4", "there is no shard; choose from shared, turns, n"),
        ("8x8@1:turns=0", "each number must be at least 1"),
        ("8x8@1:turns=2:shared=4", "turns cannot be combined with shared"),
        ("8x8@1:shared=8", "8 shared tokens leave none of the 8"),
        ("8x8@1,8x8@1", "has 8x8@1 twice"),
    ],
)
def test_a_wrong_case_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        parse_cases(text)
    assert sentence in str(raised.value)
