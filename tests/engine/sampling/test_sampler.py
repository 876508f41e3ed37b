"""The sampler against slow, simple references, and against the distributions it documents."""

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.native.model import NativeModel
from penstock.engine.sampling.sampler import (
    INVALID_ID,
    Draw,
    Sampler,
    _draw,
    _penalise,
    _pick,
    _uniforms,
    failed_rows,
)
from penstock.scheduler.types import FinishReason, SamplingParams, TokenLogprobs
from tests.support.compiler import needs_compiler
from tests.support.kernels import LOGPROB_TOLERANCE
from tests.support.sampling_reference import penalised, survivors
from tests.support.tiny_models import Harness, make_model, save

CPU = torch.device("cpu")
# 2 blocks and a remainder; less than a block; whole blocks; enough for two-level selection.
VOCAB_SIZES = (131, 7, 128, 20_011)


# Who draws: None for torch's operators.
_compiled_draw: Draw | None = None


@pytest.fixture(
    scope="module", autouse=True, params=["torch", pytest.param("compiled", marks=needs_compiler)]
)
def who_draws(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every test here holds for both."""
    global _compiled_draw
    _compiled_draw = None
    if request.param == "compiled":
        directory = tmp_path_factory.mktemp("model")
        save(make_model("llama2"), directory)
        model = Harness(directory, native=True).model
        assert isinstance(model, NativeModel)
        _compiled_draw = model.draw


def sampler_of(max_num_seqs: int, vocab_size: int) -> Sampler:
    return Sampler(max_num_seqs, vocab_size, CPU, draw=_compiled_draw)


def params(temperature: float = 1.0, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=temperature, **options)  # type: ignore[arg-type]


def peaked_logits(vocab_size: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))


def draw(logits: Tensor, sampling: SamplingParams, num: int, seed: int = 0) -> list[int]:
    """One row's ids at positions 0 to num, each of them a row of one batch."""
    sampler = sampler_of(1, len(logits))
    sampler.assign(0, sampling, seed)
    rows = logits.expand(num, -1)
    table = torch.zeros(1, num, dtype=torch.int64)
    ids, _ = sampler.sample(rows, [0] * num, list(range(num)), table, [0] * num)
    return ids.tolist()


def assert_fits(ids: list[int], probabilities: Tensor) -> None:
    """Chi-square of the ids against the probabilities, within five standard deviations.

    Cells that expect fewer than five are pooled, as usual.
    """
    expected = probabilities.double() / probabilities.sum() * len(ids)
    counts = torch.bincount(torch.tensor(ids), minlength=len(expected)).double()
    assert counts[expected == 0].sum() == 0, "an id of probability 0 was drawn"
    small = expected < 5
    expected = torch.cat((expected[~small], expected[small].sum().view(1)))
    counts = torch.cat((counts[~small], counts[small].sum().view(1)))
    used = expected > 0
    chi_square = ((counts - expected)[used] ** 2 / expected[used]).sum().item()
    freedom = int(used.sum()) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 1, (chi_square, freedom)


# --- the distribution -----------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_frequencies_are_the_softmax_at_the_temperature(
    vocab_size: int, temperature: float
) -> None:
    logits = peaked_logits(vocab_size)
    ids = draw(logits, params(temperature), num=2_000 if vocab_size > 1_000 else 20_000)
    assert_fits(ids, (logits.double() / temperature).softmax(-1))


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
        {"top_p": 0.999, "temperature": 2.0},
    ],
)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_frequencies_are_the_softmax_of_the_survivors(
    options: dict[str, float], vocab_size: int
) -> None:
    sampling = params(**options)
    logits = peaked_logits(vocab_size, seed=1)
    kept = sorted(survivors(logits, sampling))
    expected = torch.zeros(vocab_size, dtype=torch.float64)
    expected[kept] = (logits[kept].double() / sampling.temperature).softmax(-1)
    assert_fits(draw(logits, sampling, num=1_500 if vocab_size > 1_000 else 20_000), expected)


def test_a_large_flat_vocabulary_is_drawn_evenly() -> None:
    """A float32 running sum would lose several percent for ids near the end."""
    vocab_size = 151_936
    tenths = [i * 10 // vocab_size for i in draw(torch.zeros(vocab_size), params(), num=1_000)]
    assert_fits(tenths, torch.ones(10))


# --- the filters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [2, 3, 50, 130, 131, 1_000])
def test_top_k_keeps_exactly_the_k_best(top_k: int) -> None:
    logits = torch.randperm(131, generator=torch.Generator().manual_seed(0)) / 131
    ids = set(draw(logits, params(top_k=top_k), num=8_000))
    assert ids == set(logits.topk(min(top_k, 131)).indices.tolist())


def test_all_ids_tied_with_the_kth_survive() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0, -1.0])
    assert set(draw(logits, params(top_k=2), num=500)) == {1, 2, 3, 4}


def test_all_ids_tied_with_the_last_of_a_nucleus_survive() -> None:
    assert set(draw(torch.zeros(70), params(top_p=1e-9), num=5_000)) == set(range(70))


@pytest.mark.parametrize("top_p", [0.0, 1e-9, 0.1])
def test_a_tiny_top_p_keeps_only_the_best(top_p: float) -> None:
    logits = torch.tensor([0.0, 1.0, 3.0, 2.0])
    assert set(draw(logits, params(top_p=top_p), num=200)) == {2}


def test_top_p_applies_to_what_min_p_and_top_k_leave() -> None:
    logits = torch.tensor([0.4, 0.3, 0.1, 0.1, 0.1]).log()
    # Of the two best, 0.4 is 57%: enough for 0.55. Of all five it would not be.
    assert set(draw(logits, params(top_p=0.55, top_k=2), num=300)) == {0}
    assert set(draw(logits, params(top_p=0.55, min_p=0.5), num=300)) == {0}
    assert set(draw(logits, params(top_p=0.55), num=300)) == {0, 1}


def test_min_p_1_keeps_only_the_best() -> None:
    assert set(draw(peaked_logits(100), params(min_p=1.0), num=100)) == {
        int(peaked_logits(100).argmax())
    }


grid_logits = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=80)
samplings = st.builds(
    params,
    temperature=st.sampled_from([0.25, 0.7, 1.0, 2.0]),
    top_k=st.integers(0, 90),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 0.9]),
)


@settings(max_examples=150, deadline=None)
@given(values=grid_logits, sampling=samplings, seed=st.integers(-(2**70), 2**70))
def test_a_filtered_token_is_never_returned(
    values: list[float], sampling: SamplingParams, seed: int
) -> None:
    logits = torch.tensor(values)
    # The exact edge of a nucleus depends on rounding, in the reference too.
    wider = params(
        sampling.temperature,
        top_k=sampling.top_k,
        min_p=sampling.min_p * (1 - 1e-5),
        top_p=min(1.0, sampling.top_p + 1e-5),
    )
    assert set(draw(logits, sampling, num=40, seed=seed)) <= survivors(logits, wider)


@settings(max_examples=100, deadline=None)
@given(values=grid_logits, seed=st.integers(0, 2**64 - 1))
def test_temperature_near_0_agrees_with_greedy_up_to_ties(values: list[float], seed: int) -> None:
    logits = torch.tensor(values)
    ids = draw(logits, params(1e-4), num=5, seed=seed)
    assert all(logits[i] == logits.max() for i in ids)


@settings(max_examples=100, deadline=None)
@given(values=grid_logits, seed=st.integers(0, 2**64 - 1))
def test_top_k_1_and_temperature_0_are_the_first_of_the_best(
    values: list[float], seed: int
) -> None:
    logits = torch.tensor(values)
    first = values.index(max(values))
    assert draw(logits, params(top_k=1), num=3, seed=seed) == [first] * 3
    assert draw(logits, params(0.0), num=3, seed=seed) == [first] * 3


def test_greedy_is_argmax_in_a_vocabulary_of_any_size() -> None:
    for vocab_size in (1, 63, 64, 65, 640, 4_099):
        logits = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
        sampler = sampler_of(9, vocab_size)
        for slot in range(9):
            sampler.assign(slot, params(0.0), seed=slot)
        ids, report = sampler.sample(
            logits, list(range(9)), [1] * 9, torch.zeros(9, 2, dtype=torch.int64), [1] * 9
        )
        assert torch.equal(ids, logits.argmax(-1))
        assert ids.dtype == torch.int64
        assert report is None


def test_a_step_that_samples_nothing_gives_no_ids() -> None:
    ids, report = sampler_of(1, 64).sample(
        torch.empty(0, 64), [], [], torch.zeros(1, 2, dtype=torch.int64), []
    )
    assert ids.tolist() == []
    assert report is None


# --- the randomness -------------------------------------------------------------------------------

MANY_OPTIONS: list[SamplingParams] = [
    params(0.0),
    params(0.0, presence_penalty=1.5, num_logprobs=2),
    params(1.0),
    params(0.8, top_p=0.9),
    params(1.0, top_k=3),
    params(1.0, top_k=40, top_p=0.9999, num_logprobs=0),
    params(2.0, top_p=0.99),
    params(1.0, min_p=0.1, repetition_penalty=1.3),
    params(1.0, frequency_penalty=0.5, presence_penalty=-0.5, num_logprobs=5),
    params(1.5, logit_bias=((3, 4.0), (5, -100.0))),
]


@pytest.mark.parametrize("vocab_size", [131, 20_032])
def test_a_rows_id_depends_neither_on_other_rows_nor_order_nor_slot(vocab_size: int) -> None:
    num = 4 * len(MANY_OPTIONS)
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(num, vocab_size, generator=generator)
    tokens = torch.randint(vocab_size, (num, 31), generator=generator, dtype=torch.int32)
    lengths = [10 + i % 20 for i in range(num)]
    prompts = [1 + i % 10 for i in range(num)]

    def sample(rows: list[int], slots: list[int]) -> dict[int, tuple[int, TokenLogprobs | None]]:
        sampler = sampler_of(num, vocab_size)
        table = torch.zeros(num, 31, dtype=torch.int32)
        for row, slot in zip(rows, slots, strict=True):
            sampler.assign(slot, MANY_OPTIONS[row % len(MANY_OPTIONS)], seed=row // 2)
            table[slot] = tokens[row]
        ids, report = sampler.sample(
            logits[rows], slots, [lengths[r] for r in rows], table, [prompts[r] for r in rows]
        )
        return dict(zip(rows, zip(ids.tolist(), report or [None] * num, strict=False), strict=True))

    together = sample(list(range(num)), list(range(num)))
    order = random.Random(1).sample(range(num), num)
    assert sample(order, random.Random(2).sample(range(num), num)) == together
    for row in range(num):
        assert sample([row], [num - 1 - row])[row] == together[row]


def test_a_slot_keeps_nothing_of_its_previous_sequence() -> None:
    logits = peaked_logits(131).expand(1, -1)
    table = torch.zeros(1, 9, dtype=torch.int64)
    fresh, used = sampler_of(1, 131), sampler_of(1, 131)
    used.assign(0, params(1.7, top_k=2, num_logprobs=1, logit_bias=((0, 100.0),)), seed=9)
    for sampler in (fresh, used):
        sampler.assign(0, params(1.0, top_p=0.9), seed=4)
    assert used.sample(logits, [0], [8], table, [1]) == fresh.sample(logits, [0], [8], table, [1])
    used.assign(0, params(0.0), seed=4)
    assert used.sample(logits, [0], [8], table, [1])[0].tolist() == [int(logits.argmax())]


def test_answers_that_ban_the_same_share_one_mask() -> None:
    ids, other_ids = tuple(range(9)), tuple(range(10))
    shared = SamplingParams(max_tokens=5, allowed_token_ids=ids)
    sampler = sampler_of(3, 131)
    sampler.assign(0, shared, 1)
    sampler.assign(1, replace(shared, max_tokens=6), 2)
    sampler.assign(2, replace(shared, allowed_token_ids=other_ids), 3)
    first, second, third = sampler._bans
    assert first is second is not third


@pytest.mark.parametrize("step", [1, 2, 1_000])
def test_neighbouring_positions_and_seeds_are_uncorrelated(step: int) -> None:
    num, vocab_size = 20_000, 16
    by_position = draw(torch.zeros(vocab_size), params(), num + step)
    sampler = sampler_of(num + step, vocab_size)
    for seed in range(num + step):
        sampler.assign(seed, params(), seed)
    ones = [1] * (num + step)
    table = torch.zeros(num + step, 1, dtype=torch.int64)
    rows = torch.zeros(num + step, vocab_size)
    by_seed = sampler.sample(rows, list(range(num + step)), ones, table, ones)[0].tolist()
    for ids in (by_position, by_seed):
        pairs = [a * vocab_size + b for a, b in zip(ids, ids[step:], strict=False)]
        assert_fits(pairs, torch.ones(vocab_size**2))


def test_the_generator_is_splitmix64() -> None:
    """The first outputs of Vigna's splitmix64.c from state 0."""
    outputs = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC)
    keys = torch.zeros(2, 1, dtype=torch.int64)
    uniforms = _uniforms(keys, torch.tensor([0, 1]))
    assert uniforms.flatten().tolist() == [(word >> 11) / 2**53 for word in outputs]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_no_uniform_draws_a_weight_of_0_or_overruns(uniform: float) -> None:
    u = torch.full((1, 2), uniform, dtype=torch.float64)
    for weights in ([0, 0, 1, 0], [0, 1e-30, 0, 1e-30, 0], [0.0, *[1 / 3] * 5000, 0.0]):
        row = torch.zeros(1, 5_056)
        row[0, : len(weights)] = torch.tensor(weights)
        assert row[0, _draw(row, u)] > 0
        assert row[0, _pick(row, u[:, :1])] > 0


# --- penalties and bias ---------------------------------------------------------------------------


penalties = st.builds(
    params,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 1.1, -0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.6, -0.4]),
)
histories = st.lists(st.integers(0, 19), min_size=1, max_size=30)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.tuples(histories, st.integers(1, 30), penalties), min_size=1, max_size=4))
def test_penalties_are_those_of_plain_python(
    rows: list[tuple[list[int], int, SamplingParams]],
) -> None:
    x = torch.stack([peaked_logits(20, seed) for seed in range(len(rows))])
    expected = [
        penalised(logits, tokens, prompt, sampling)
        for logits, (tokens, prompt, sampling) in zip(x.tolist(), rows, strict=True)
    ]
    table = torch.randint(20, (len(rows), 33))
    for row, (tokens, _, _) in zip(table, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values).unsqueeze(1)

    _penalise(
        x,
        table,
        column([len(tokens) for tokens, _, _ in rows]),
        column([prompt for _, prompt, _ in rows]),
        column([sampling.repetition_penalty for _, _, sampling in rows]),
        column([sampling.presence_penalty for _, _, sampling in rows]),
        column([sampling.frequency_penalty for _, _, sampling in rows]),
    )
    for row, values in zip(x.tolist(), expected, strict=True):
        assert row == pytest.approx(values, abs=1e-5)


def test_frequencies_are_the_softmax_of_the_penalised_logits() -> None:
    num, tokens, prompt = 4_000, [1, 2, 2, 3, 4, 4, 4, 5], 3
    sampling = params(1.3, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.4)
    sampler = sampler_of(num, 20)
    for slot in range(num):
        sampler.assign(slot, sampling, seed=slot)
    table = torch.tensor([*tokens, 6]).expand(num, -1)
    logits = peaked_logits(20, seed=2)
    ids, _ = sampler.sample(
        logits.expand(num, -1), list(range(num)), [len(tokens)] * num, table, [prompt] * num
    )
    expected = torch.tensor(penalised(logits.tolist(), tokens, prompt, sampling))
    assert_fits(ids.tolist(), (expected / 1.3).softmax(-1))


def test_a_bias_of_minus_100_bans_and_of_100_forces() -> None:
    logits = peaked_logits(131)
    best = int(logits.argmax())
    assert best not in draw(logits, params(1.0, logit_bias=((best, -100.0),)), num=2_000)
    assert draw(logits, params(0.0, logit_bias=((best, -100.0),)), num=1) != [best]
    for temperature in (0.0, 1.0, 2.0):
        forced = draw(logits, params(temperature, logit_bias=((9, 100.0),)), num=500)
        assert set(forced) == {9}


def test_bias_shifts_the_distribution_by_its_value() -> None:
    logits = peaked_logits(20)
    biased = logits.clone()
    biased[3] += 2.5
    biased[4] -= 1.5
    # An id outside the vocabulary, and one that is given twice.
    bias = ((3, 2.0), (3, 0.5), (4, -1.5), (20, 5.0), (-1, 5.0))
    assert_fits(draw(logits, params(logit_bias=bias), num=20_000), biased.softmax(-1))


# --- logprobs -------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_logits_and_only_for_rows_that_request_them() -> None:
    logits = 3 * torch.randn(5, 131, generator=torch.Generator().manual_seed(3))
    before = logits.clone()
    requested = [None, 0, 3, 20, 500]
    sampler = sampler_of(5, 131)
    for slot, num in enumerate(requested):
        sampler.assign(
            slot,
            params(
                0.5 * slot,
                num_logprobs=num,
                top_k=4,
                presence_penalty=2.0,
                logit_bias=((7, 100.0),),
            ),
            seed=slot,
        )
    table = torch.randint(131, (5, 10))
    ids, report = sampler.sample(logits, [0, 1, 2, 3, 4], [9] * 5, table, [2] * 5)
    assert torch.equal(logits, before)
    assert report is not None
    assert report[0] is None
    for row, num in list(enumerate(requested))[1:]:
        expected = before[row].double().log_softmax(-1)
        entry = report[row]
        assert entry is not None
        assert num is not None
        assert entry.logprob == pytest.approx(expected[ids[row]].item(), abs=LOGPROB_TOLERANCE)
        assert len(entry.top) == min(num, 131)
        for (token, logprob), best in zip(
            entry.top, expected.sort(descending=True).values.tolist(), strict=False
        ):
            assert logprob == pytest.approx(best, abs=LOGPROB_TOLERANCE)
            assert expected[token].item() == pytest.approx(best, abs=LOGPROB_TOLERANCE)


# --- invalid logits -------------------------------------------------------------------------------

INF, NAN = math.inf, math.nan
HUGE = 3e38


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ([0.0, INF, 1.0, INF], {INVALID_ID}),
        ([NAN, 1.0, NAN, -INF], {INVALID_ID}),
        ([NAN, NAN, NAN, NAN], {INVALID_ID}),
        ([-INF, -INF, -INF, -INF], {0}),
        ([NAN, -INF, -INF, -INF], {INVALID_ID}),
        ([-INF, -INF, 2.0, -INF], {2}),
        ([HUGE, -HUGE, HUGE, 0.0], {0, 2}),
        ([-HUGE, -HUGE, -HUGE, -HUGE], {0, 1, 2, 3}),
        ([1e9, 0.0, -1e9, 1e9 - 1e4], {0}),
    ],
)
@pytest.mark.parametrize("vocab_size", [4, 100, 128])
@pytest.mark.parametrize(
    "sampling",
    [
        params(0.0, num_logprobs=2),
        params(1.0, num_logprobs=4),
        params(1e-4),
        params(2.0, top_p=0.9),
        params(1.0, top_p=1e-9, min_p=0.5),
        params(1.0, top_k=2, repetition_penalty=1.5),
        params(0.0, frequency_penalty=2.0, logit_bias=((2, 1.0),)),
    ],
    ids=str,
)
def test_invalid_logits_give_no_id_extreme_ones_a_defined_id_and_neither_affects_other_rows(
    values: list[float], allowed: set[int], vocab_size: int, sampling: SamplingParams
) -> None:
    logits = torch.full((3, vocab_size), -INF)
    logits[1, :4] = torch.tensor(values)
    logits[0] = logits[2] = peaked_logits(vocab_size)
    sampler = sampler_of(3, vocab_size)
    for slot in range(3):
        sampler.assign(slot, sampling, seed=slot)
    table = torch.full((3, 4), 3)
    ids, report = sampler.sample(logits, [0, 1, 2], [2] * 3, table, [1] * 3)
    assert int(ids[1]) in allowed
    for entry in report or []:
        assert entry is not None
        assert not any(map(math.isnan, (entry.logprob, *(value for _, value in entry.top))))

    alone, _ = sampler.sample(logits[::2], [0, 2], [2] * 2, table, [1] * 2)
    assert alone.tolist() == ids[::2].tolist()


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=70),
    sampling=samplings,
    seed=st.integers(0, 2**64 - 1),
)
def test_any_logits_give_an_id_in_range_unless_one_is_nan_or_infinite(
    values: list[float], sampling: SamplingParams, seed: int
) -> None:
    ids = draw(torch.tensor(values), sampling, num=4, seed=seed)
    if any(math.isnan(value) or value == INF for value in values):
        assert {int(i) for i in ids} == {INVALID_ID}
    else:
        assert all(0 <= i < len(values) for i in ids)


def test_a_row_without_an_id_fails_and_so_does_one_whose_grammar_fails() -> None:
    assert failed_rows([3, INVALID_ID, 0, 7], frozenset({3})) == {
        1: FinishReason.INVALID_LOGITS,
        3: FinishReason.ERROR,
    }
    assert failed_rows([3, 0], frozenset()) == failed_rows([], frozenset()) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_gives_the_ids_of_the_cpu() -> None:
    num, vocab_size = 200, 20_011
    generator = torch.Generator().manual_seed(7)
    logits = 3 * torch.randn(num, vocab_size, generator=generator)
    table = torch.randint(vocab_size, (num, 30), generator=generator)
    results = []
    for device in (CPU, torch.device("cuda")):
        sampler = Sampler(num, vocab_size, device)
        for slot in range(num):
            sampler.assign(slot, MANY_OPTIONS[slot % len(MANY_OPTIONS)], seed=slot)
        slots, lengths, prompts = list(range(num)), [20] * num, [9] * num
        ids, _ = sampler.sample(logits.to(device), slots, lengths, table.to(device), prompts)
        results.append(ids.tolist())
    # The devices' exponentials differ in the last bit, so a draw at an edge may go either way.
    assert sum(a != b for a, b in zip(*results, strict=True)) <= 1
