"""Token bans, against a loop over tokens in plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.sampling.token_bans import TokenBans, has_token_bans
from penstock.scheduler.types import SamplingParams

VOCAB_SIZE = 8
CPU = torch.device("cpu")
ids = st.integers(0, VOCAB_SIZE - 1)


def banned_ids(sampling: SamplingParams, tokens: list[int], num_prompt: int) -> set[int]:
    x = torch.zeros(VOCAB_SIZE)
    table = torch.tensor([*tokens, *[7] * 4])  # tokens after the length are never read
    TokenBans(sampling, VOCAB_SIZE, CPU).apply(x, table, len(tokens), num_prompt)
    assert not x.isnan().any()
    return {int(i) for i in (x == -torch.inf).nonzero()}


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), max_size=5).map(tuple),
    prompt=st.lists(ids, min_size=1, max_size=4),
    answer=st.lists(ids, max_size=6),
)
def test_a_bad_words_last_token_is_banned_only_after_its_other_tokens(
    words: tuple[tuple[int, ...], ...], prompt: list[int], answer: list[int]
) -> None:
    sampling = SamplingParams(max_tokens=9, bad_words=words)
    expected = {
        word[-1]
        for word in words
        if len(word) - 1 <= len(answer)
        and tuple(answer[len(answer) - len(word) + 1 :]) == word[:-1]
    }
    assert banned_ids(sampling, prompt + answer, len(prompt)) == expected


@pytest.mark.parametrize(("num_outputs", "expected"), [(0, {2, 5}), (2, {2, 5}), (3, set())])
def test_the_stop_ids_are_banned_before_min_tokens(num_outputs: int, expected: set[int]) -> None:
    sampling = SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=(2, 5))
    assert banned_ids(sampling, [1] * (4 + num_outputs), 4) == expected


def test_all_ids_but_the_allowed_ones_are_banned() -> None:
    sampling = SamplingParams(max_tokens=9, allowed_token_ids=(1, 6), bad_words=((6,),))
    assert banned_ids(sampling, [0], 1) == set(range(VOCAB_SIZE)) - {1}


def test_ids_beyond_the_vocabulary_are_ignored() -> None:
    sampling = SamplingParams(
        max_tokens=9,
        min_tokens=1,
        stop_token_ids=(99,),
        bad_words=((99,), (0, 99)),
        allowed_token_ids=(3, 99),
    )
    assert banned_ids(sampling, [0], 1) == set(range(VOCAB_SIZE)) - {3}


def test_a_request_without_bans_has_none() -> None:
    assert not has_token_bans(SamplingParams(max_tokens=9, stop_token_ids=(2,)))
    assert not has_token_bans(SamplingParams(max_tokens=9, min_tokens=3))
