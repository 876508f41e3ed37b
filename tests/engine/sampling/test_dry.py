"""DRY and XTC, against plain Python written from their definitions, and through a `Sampler`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.sampling.dry import DryPenalty
from penstock.engine.sampling.sampler import Sampler, _uniforms, mixed_seed
from penstock.scheduler.types import Dry, SamplingParams, Xtc

VOCAB_SIZE = 6
CPU = torch.device("cpu")
ids = st.integers(0, VOCAB_SIZE - 1)


def expected_penalties(dry: Dry, tokens: list[int]) -> list[float]:
    """By comparing every place with the end, token by token."""
    if dry.last_n >= 0:
        tokens = tokens[max(0, len(tokens) - dry.last_n) :]
    longest = [0] * VOCAB_SIZE
    for place in range(len(tokens) - 1):
        length = 0
        while length <= place and tokens[place - length] == tokens[-1 - length]:
            if tokens[-1 - length] in dry.breaker_ids or length == 64:
                break
            length += 1
        follower = tokens[place + 1]
        longest[follower] = max(longest[follower], length)
    excess = [length - dry.allowed_length for length in longest]
    return [dry.multiplier * dry.base**e if e >= 0 else 0.0 for e in excess]


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(ids, min_size=1, max_size=30)
    | st.tuples(st.lists(ids, min_size=1, max_size=3), st.integers(2, 30)).map(
        lambda block: block[0] * block[1]
    ),
    allowed_length=st.integers(1, 4),
    last_n=st.sampled_from([-1, 1, 5, 20]),
    breakers=st.sets(ids | st.just(99), max_size=2),
)
def test_the_token_after_a_repetition_loses_what_its_length_says(
    tokens: list[int], allowed_length: int, last_n: int, breakers: set[int]
) -> None:
    dry = Dry(0.5, 1.5, allowed_length, last_n, tuple(breakers))
    x = torch.zeros(VOCAB_SIZE)
    table = torch.tensor([*tokens, 0, 1, 2, 3])  # tokens after the length are never read
    DryPenalty(dry, VOCAB_SIZE, CPU).apply(x, table, len(tokens))
    assert (-x).tolist() == pytest.approx(expected_penalties(dry, tokens), rel=1e-5)


def test_a_long_repetition_leaves_finite_logits() -> None:
    x = torch.zeros(VOCAB_SIZE)
    tokens = torch.tensor([1, 2] * 400)
    DryPenalty(Dry(100.0, 100.0, 1, -1, ()), VOCAB_SIZE, CPU).apply(x, tokens, 800)
    assert x.isfinite().all()
    assert x[1] < -1e30


def test_greedy_decoding_leaves_a_repetition_by_dry_and_not_without() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.0, 0.0, 0.0, 0.0]])
    table = torch.tensor([[3, 4, 1, 3, 4, 1, 3, 4, 0, 0]], dtype=torch.int32)
    found = []
    for dry in (None, Dry(1.0, 2.0, 2, -1, ())):
        sampler = Sampler(1, VOCAB_SIZE, CPU)
        sampler.assign(0, SamplingParams(max_tokens=9, temperature=0, dry=dry), 0)
        found.append(sampler.sample(logits, [0], [8], table, [2])[0].item())
    assert found == [1, 2]


def draws(xtc: Xtc | None, positions: range, **options: float) -> list[int]:
    """One id at each position, of the probabilities 0.5, 0.3, 0.15 and 0.05."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    sampler = Sampler(1, 4, CPU)
    table = torch.zeros(1, positions.stop + 1, dtype=torch.int32)
    sampling = SamplingParams(max_tokens=9, xtc=xtc, **options)  # type: ignore[arg-type]
    sampler.assign(0, sampling, 7)
    return [int(sampler.sample(logits, [0], [p], table, [1])[0]) for p in positions]


@pytest.mark.parametrize(
    ("threshold", "survivors"),
    [(0.4, {0, 1, 2, 3}), (0.2, {1, 2, 3}), (0.1, {2, 3}), (0.01, {3})],
)
def test_all_likely_ids_but_the_least_likely_of_them_are_excluded(
    threshold: float, survivors: set[int]
) -> None:
    assert set(draws(Xtc(1.0, threshold), range(1, 200))) == survivors


def test_the_threshold_is_of_what_the_other_filters_leave() -> None:
    assert set(draws(Xtc(1.0, 0.33), range(1, 100), top_k=2)) == {1}  # 0.3 of 0.8
    assert set(draws(Xtc(1.0, 0.33), range(1, 100))) == {0, 1, 2, 3}


def test_it_is_applied_with_its_probability_by_a_random_number_of_its_own() -> None:
    often = draws(Xtc(0.5, 0.1), range(1, 400))
    plain = draws(None, range(1, 400))
    same = [a == b for a, b in zip(often, plain, strict=True)]
    assert 0.35 < sum(id_ in (0, 1) for id_ in often) / 399 < 0.45  # 0.8 of a half
    assert 0.5 < sum(same) / 399 < 0.8


def test_a_seed_gives_the_same_ids_alone_and_among_other_rows() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    table = torch.zeros(3, 20, dtype=torch.int32)
    xtc = SamplingParams(max_tokens=9, xtc=Xtc(0.5, 0.05), top_p=0.9)
    sampler = Sampler(3, 40, CPU)
    for slot, sampling in enumerate((SamplingParams(max_tokens=9), xtc, xtc)):
        sampler.assign(slot, sampling, slot)
    for position in range(1, 20):
        together = sampler.sample(logits, [0, 1, 2], [position] * 3, table, [1] * 3)[0]
        alone = [
            sampler.sample(logits[i : i + 1], [i], [position], table, [1])[0] for i in range(3)
        ]
        assert together.tolist() == torch.cat(alone).tolist()


def test_the_random_number_of_xtc_is_not_one_that_draws() -> None:
    keys = torch.tensor([[mixed_seed(5) % 2**62]])
    positions = torch.tensor([3])
    others = {float(u) for p in range(64) for u in _uniforms(keys, positions + p - 3)[0]}
    assert float(_uniforms(keys ^ 0x5851F42D4C957F2D, positions)[0, 0]) not in others
