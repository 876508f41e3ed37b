"""One seed gives one workload, whatever else is set, with the lengths and rates of its config."""

import math
from dataclasses import replace
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loadtest.workload.config import Dataset, PromptFormat, WorkloadConfig, arrival_times
from penstock.loadtest.workload.workload import make_requests
from penstock.scheduler.errors import InvalidConfig

SMALL = WorkloadConfig(seed=7, num_prompts=40, input_len=50, output_len=20, request_rate=10.0)


def test_the_same_seed_gives_the_same_requests() -> None:
    assert make_requests(SMALL) == make_requests(SMALL)
    assert make_requests(SMALL) != make_requests(replace(SMALL, seed=8))


def test_more_prompts_only_append() -> None:
    assert make_requests(replace(SMALL, num_prompts=60))[:40] == make_requests(SMALL)


def test_longer_outputs_leave_prompts_and_arrivals_alone() -> None:
    for one, other in zip(
        make_requests(SMALL), make_requests(replace(SMALL, output_len=90)), strict=True
    ):
        assert (one.prompt, one.arrival_s) == (other.prompt, other.arrival_s)


def test_another_rate_stretches_the_same_arrivals() -> None:
    slow, fast = arrival_times(3, 100, 2.0), arrival_times(3, 100, 8.0)
    assert slow == pytest.approx([4 * at for at in fast])


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(3, 5, math.inf) == [0.0] * 5


def test_gaps_between_arrivals_are_exponential() -> None:
    times = arrival_times(1, 20_000, 50.0)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    # An exponential's mean and deviation are both 1 / rate, and it exceeds 2 / rate at exp(-2).
    assert fmean(gaps) == pytest.approx(0.02, rel=0.03)
    assert pstdev(gaps) == pytest.approx(0.02, rel=0.03)
    assert sum(gap > 0.04 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-2), rel=0.05)


@given(length=st.integers(1, 200), ratio=st.floats(0, 0.99), seed=st.integers(), text=st.booleans())
def test_lengths_stay_within_the_range_ratio(
    length: int, ratio: float, seed: int, text: bool
) -> None:
    config = WorkloadConfig(
        seed=seed,
        num_prompts=20,
        input_len=length,
        output_len=length,
        range_ratio=ratio,
        prompt_format=PromptFormat.TEXT if text else PromptFormat.IDS,
    )
    low, high = max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))
    for request in make_requests(config):
        prompt = request.prompt.split() if isinstance(request.prompt, str) else request.prompt
        assert len(prompt) == request.num_prompt_tokens
        assert low <= request.num_prompt_tokens <= high
        assert low <= request.max_tokens <= high


def test_lengths_reach_both_ends_of_their_range() -> None:
    requests = make_requests(replace(SMALL, num_prompts=400, input_len=10, range_ratio=0.3))
    assert {request.num_prompt_tokens for request in requests} == set(range(7, 14))


def test_outputs_may_vary_more_than_prompts() -> None:
    varied = replace(SMALL, num_prompts=400, input_len=10, output_len=10, output_range_ratio=0.3)
    requests = make_requests(varied)
    assert {request.num_prompt_tokens for request in requests} == {10}
    assert {request.max_tokens for request in requests} == set(range(7, 14))


def test_random_ids_stay_below_the_vocabulary_and_above_the_special_ones() -> None:
    for request in make_requests(SMALL):
        assert isinstance(request.prompt, list)
        assert min(request.prompt) >= 3 and max(request.prompt) < 500


def test_prefixes_are_shared_and_what_follows_is_not() -> None:
    config = replace(
        SMALL, dataset=Dataset.SHARED_PREFIX, shared_prefix_len=30, num_prefixes=3, num_prompts=100
    )
    prompts = [request.prompt for request in make_requests(config)]
    assert {len(prompt) for prompt in prompts} == {80}
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 3
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 100


@pytest.mark.parametrize(
    ("setting", "flag"),
    [
        ({"num_prompts": 0}, "--num-prompts"),
        ({"range_ratio": 1.0}, "--random-range-ratio"),
        ({"request_rate": 0.0}, "--request-rate"),
        ({"request_rate": math.nan}, "--request-rate"),
        ({"vocab_size": 3}, "--vocab-size"),
    ],
)
def test_a_setting_that_cannot_work_names_its_flag(setting: dict[str, float], flag: str) -> None:
    with pytest.raises(InvalidConfig, match=flag):
        replace(SMALL, **setting)  # type: ignore[arg-type]
