"""Sampling on the device against simple references: which ids survive, and which one wins.

Without a GPU, Triton's interpreter runs the kernels; it takes some 0.3 s a row that has filters.
"""

import math
import os

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from penstock.engine.kernels.sample import rows as kernels  # noqa: E402
from penstock.engine.kernels.sample.rows import WORDS, encode  # noqa: E402
from penstock.engine.kernels.sample.sampler import DeviceSampler, Mode, can_fuse  # noqa: E402
from penstock.engine.sampling.sampler import INVALID_ID, Sampler  # noqa: E402
from penstock.scheduler.types import SamplingParams  # noqa: E402
from tests.support.kernels import LOGPROB_TOLERANCE  # noqa: E402
from tests.support.sampling_reference import adjusted, survivors  # noqa: E402

CPU = torch.device("cpu")


def params(temperature: float = 1.0, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=temperature, **options)  # type: ignore[arg-type]


def spread_logits(vocab_size: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Drawn:
    """One step: row i is of samplings[i], in slots[i], seeded by and at positions[i]."""

    def __init__(
        self,
        logits: Tensor,
        samplings: list[SamplingParams],
        *,
        slots: list[int] | None = None,
        positions: list[int] | None = None,
        seeds: list[int] | None = None,
        mode: Mode | None = None,
        max_listed: int = 16384,
    ) -> None:
        num_rows, size = logits.shape
        slots = slots or list(range(num_rows))
        positions = positions or [5] * num_rows
        self.sampler = DeviceSampler(max(slots) + 1, size, DEVICE, max_listed=max_listed)
        for row, (slot, sampling) in enumerate(zip(slots, samplings, strict=True)):
            self.sampler.assign(slot, sampling, seeds[row] if seeds else row, [0] * 5, 5)
        self.sampler.flush()
        self.mode = self.sampler.mode(slots) if mode is None else mode
        if self.mode is Mode.ADJUSTED:
            self.sampler.allow_adjustments()
        ids, logprobs = int32([-7] * num_rows), torch.full((num_rows,), math.nan, device=DEVICE)
        before = logits.clone()
        self.sampler.sample(
            logits.to(DEVICE), int32(slots), int32(positions), ids, logprobs, self.mode
        )
        assert torch.equal(before.nan_to_num(7), logits.nan_to_num(7)), "it wrote to the logits"
        self.ids: list[int] = ids.tolist()
        self.logprobs: list[float] = logprobs.tolist()
        self.limits: list[int] = self.sampler.limits[:num_rows].tolist()


@triton.jit
def _store_noise(table, positions, noise, size, ROWS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, SIZE)
    key = kernels.row_key(table, tl.load(positions + row))
    distance = tl.zeros((ROWS, SIZE), tl.float32)
    times = -kernels.race_score(key[:, None], token[None, :], distance)
    tl.store(noise + row[:, None] * size + token[None, :], times, mask=token[None, :] < size)


def noise(seed: int, positions: Tensor, size: int) -> Tensor:
    """The exponential times at each of these positions of each id: (positions, size)."""
    words, _ = encode(params(), seed, 0, size)
    out = torch.empty(len(positions), size, device=DEVICE)
    padded = triton.next_power_of_2(size)
    # The interpreter is fastest with large tiles, which compilers take more than ten minutes for.
    rows = min(len(positions), 2**12 if DEVICE.type == "cpu" else max(1, 2**12 // padded))
    _store_noise[(len(positions) // rows,)](
        int32(words), positions.int().to(DEVICE), out, size, ROWS=rows, SIZE=padded
    )
    return out.cpu()


def distance(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """How far below the best each id is, in units of the temperature: float32, as on the device."""
    x = logits.float()
    return (x.max() - x) * torch.tensor(1.0 / sampling.temperature)


def assert_is_the_draw_from_survivors(
    logits: Tensor, samplings: list[SamplingParams], drawn: Drawn
) -> None:
    """Every row (row i seeded by i, at position 5) against simple filters and the noise."""
    for row, (x, sampling) in enumerate(zip(logits, samplings, strict=True)):
        z = distance(x, sampling)
        expected = torch.zeros(len(x), dtype=torch.bool)
        expected[list(survivors(x, sampling))] = True
        kept = z.view(torch.int32) <= drawn.limits[row]
        assert torch.equal(kept, expected), (sampling, int(kept.sum()), int(expected.sum()))
        times = noise(row, torch.tensor([5]), len(x))[0] * z.exp()
        assert drawn.ids[row] == int(times.masked_fill(~kept, math.inf).argmin()), sampling


# --- greedy, and invalid logits -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_the_best(dtype: torch.dtype) -> None:
    inf, nan = math.inf, math.nan
    odd = torch.full((8, 5000), -3.0)
    odd[0, [4999, 4100, 7]] = 2.0  # a tie across chunks
    odd[1, [4099, 4100]] = 2.0
    odd[2, 0], odd[2, 4500] = nan, 1.0
    odd[3, [900, 4900]] = inf
    odd[3, 1] = nan
    odd[4] = -inf
    odd[5] = nan
    odd[6] = torch.where(torch.arange(5000) == 4321, -1e30, -inf)
    odd[7, 4999] = 0.0
    drawn = Drawn(odd.to(dtype), [params(0.0)] * 8)
    assert drawn.mode is Mode.PLAIN
    assert drawn.ids == [7, 4099, INVALID_ID, INVALID_ID, 0, INVALID_ID, 4321, 4999]


@pytest.mark.parametrize(
    "sampling",
    [
        params(),
        params(0.0, num_logprobs=0),
        params(top_p=0.9, top_k=3, num_logprobs=0),
        params(frequency_penalty=1.0),
        params(0.0, logit_bias=((2, 1.0),), num_logprobs=0),
    ],
    ids=str,
)
def test_a_row_with_nan_or_infinity_gives_no_id_and_the_others_theirs(
    sampling: SamplingParams,
) -> None:
    inf, nan = math.inf, math.nan
    odd = torch.tensor(
        [
            [nan, 1.0, -inf, nan],
            [1.0, nan, inf, 3.0],
            [-inf, -inf, -inf, -inf],
            [nan, nan, -inf, nan],
            [-inf, -inf, -inf, -1e30],
        ]
    )
    drawn = Drawn(odd, [sampling] * 5)
    assert drawn.ids == [INVALID_ID, INVALID_ID, 0, INVALID_ID, 3]
    if sampling.num_logprobs is not None:
        assert drawn.logprobs[4] == 0.0


def test_filters_that_leave_one_id_are_greedy() -> None:
    logits = spread_logits(1000).repeat(6, 1)
    samplings = [
        params(1e-6),
        params(1e-4),
        params(top_k=1),
        params(top_p=0.0),
        params(min_p=1.0),
        params(1.5, top_p=1e-9, top_k=7),
    ]
    assert Drawn(logits, samplings).ids == [int(logits[0].argmax())] * 6


# --- the draw -------------------------------------------------------------------------------------


def test_noise_draws_in_proportion_to_the_weights() -> None:
    """Chi-square, within five standard deviations, over 2**17 draws."""
    logits = spread_logits(97, seed=3) / 2
    parts = [noise(seed, torch.arange(2**14), 97) for seed in range(8)]
    ids = torch.cat([(part / logits.exp()).argmin(1) for part in parts])
    expected = logits.double().softmax(0) * len(ids)
    counts = torch.bincount(ids, minlength=97).double()
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 96 + 5 * math.sqrt(2 * 96), chi_square
    assert float(parts[0].mean()) == pytest.approx(1.0, abs=0.01)
    assert float(parts[0].var()) == pytest.approx(1.0, abs=0.02)


@pytest.mark.slow
def test_ids_of_many_seeds_are_in_proportion_too() -> None:
    """The whole way, with filters and without; of 5 ids, top_k leaves 3."""
    weights = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0])
    plain = Drawn(weights.log().repeat(300, 1), [params()] * 300, seeds=list(range(300)))
    filtered = Drawn(weights.log().repeat(60, 1), [params(top_k=3)] * 60, positions=[1] * 60)
    kept = torch.tensor([8.0, 4.0, 2.0, 0.0, 0.0])
    for ids, expected in ((plain.ids, weights), (filtered.ids, kept)):
        counts = torch.bincount(torch.tensor(ids), minlength=5)
        expected = expected / expected.sum() * len(ids)
        assert counts[expected == 0].sum() == 0
        chi_square = float(((counts - expected) ** 2 / expected)[expected > 0].sum())
        assert chi_square < 4 + 5 * math.sqrt(8), (counts, expected)


def test_noise_of_successive_positions_is_uncorrelated() -> None:
    x = noise(1, torch.arange(4096), 16)
    y = noise(2, torch.arange(4096), 16)
    for other in (x.roll(1, 0), x.roll(1, 1), y):
        correlation = torch.corrcoef(torch.stack((x.flatten(), other.flatten())))[0, 1]
        assert abs(float(correlation)) < 5 / 256


def test_plain_rows_take_the_first_of_the_race() -> None:
    temperatures = (0.7, 1.0, 2.0, 1e-3)
    logits = torch.stack([spread_logits(5000, seed) for seed in range(4)])
    drawn = Drawn(logits, [params(t) for t in temperatures])
    for row, t in enumerate(temperatures):
        times = noise(row, torch.tensor([5]), 5000)[0] * distance(logits[row], params(t)).exp()
        assert drawn.ids[row] == int(times.argmin())


def test_an_id_depends_on_seed_and_position_alone() -> None:
    """Not on its row, its slot, other rows, the mode, the stride, or the vocabulary's size."""
    samplings = [params(1.3), params(1.3, top_p=0.9)]
    x = spread_logits(3000, 5)
    alone = [Drawn(x[None], [sampling], seeds=[9], positions=[77]).ids[0] for sampling in samplings]
    wide = torch.full((4, 8200), -math.inf)
    wide[:, :3000] = x
    wide[1, :3000] = spread_logits(3000, 6)
    batch = [samplings[1], params(0.0), samplings[0], params(min_p=0.1)]
    drawn = Drawn(wide, batch, slots=[6, 0, 2, 4], seeds=[9, 1, 9, 2], positions=[77, 3, 77, 4])
    assert [drawn.ids[2], drawn.ids[0]] == alone
    strided = torch.zeros(1, 3007)[:, :3000].copy_(x[None])
    adjusted = Drawn(strided, samplings[:1], seeds=[9], positions=[77], mode=Mode.ADJUSTED)
    assert adjusted.ids[0] == alone[0]
    others = Drawn(wide[:1].repeat(4, 1), samplings[:1] * 4, seeds=[9] * 4, positions=[1, 2, 3, 4])
    assert len(set(others.ids)) > 1


# --- the filters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab_size", "options"),
    [
        (97, [{"top_k": 5}, {"top_k": 500, "top_p": 0.8}, {"min_p": 0.05, "temperature": 2.0}]),
        (1000, [{"top_p": 0.9}, {"top_p": 0.999, "temperature": 2.0}, {"top_k": 40, "min_p": 0.1}]),
        (5000, [{"top_k": 300, "top_p": 0.5}, {"top_p": 0.95}, {"top_k": 4999}]),
        (5000, [{"min_p": 0.01, "top_p": 0.7}, {"top_k": 2}]),
        (5000, [{"top_k": 50, "top_p": 0.9, "min_p": 0.02}, {"top_p": 0.1}]),
    ],
)  # fmt: skip
def test_the_survivors_are_those_of_simple_filters(
    vocab_size: int, options: list[dict[str, float]]
) -> None:
    samplings = [params(**option) for option in options]
    logits = torch.stack([spread_logits(vocab_size, seed) for seed in range(len(samplings))])
    drawn = Drawn(logits, samplings)
    assert drawn.mode is Mode.FILTERED
    assert_is_the_draw_from_survivors(logits, samplings, drawn)


def test_all_ids_tied_at_an_edge_survive() -> None:
    coarse = (spread_logits(1000, 4) * 2).round() / 2
    logits = torch.stack((coarse, coarse, torch.zeros(1000)))
    samplings = [params(top_k=20), params(top_p=0.6), params(top_p=1e-9)]
    assert_is_the_draw_from_survivors(logits, samplings, Drawn(logits, samplings))
    assert_is_the_draw_from_survivors(logits, samplings, Drawn(logits.bfloat16(), samplings))


def test_a_row_with_too_many_candidates_for_the_list_is_read_instead() -> None:
    logits = torch.stack([spread_logits(5000, seed) / 8 for seed in range(2)])
    samplings = [params(top_p=0.98), params(top_k=3000)]
    drawn = Drawn(logits, samplings, max_listed=100)
    assert_is_the_draw_from_survivors(logits, samplings, drawn)


# --- adjustments ----------------------------------------------------------------------------------


@triton.jit
def _store_adjusted(
    logits, slots, positions, table, bias, seen, masks, size, out, SIZE: tl.constexpr
):
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    params_of_slot = table + slot * WORDS
    token = tl.arange(0, SIZE)
    position, flags = tl.load(positions + row), tl.load(params_of_slot)
    source = logits, row, size, size, position, slot, params_of_slot, flags, bias, seen, masks
    x = kernels.load_logits(source, token, True)
    tl.store(out + row * size + token, x, mask=token < size)


def test_adjusted_logits_are_those_of_plain_python() -> None:
    size, num_prompt = 97, 4
    tokens = [5, 6, 7, 5, 8, 5, 9, 9, 9]
    samplings = [
        params(logit_bias=((3, 5.0), (3, 1.0), (96, -100.0), (400, 9.0))),
        params(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7),
        params(presence_penalty=-0.5, logit_bias=((9, 2.5),)),
        params(allowed_token_ids=(9, 5, 50, 400), frequency_penalty=1.0),
        params(bad_words=((5,), (96,))),
        params(stop_token_ids=(1, 2, 300), min_tokens=6),
        params(stop_token_ids=(1, 2), min_tokens=5),
        params(0.0),
    ]
    logits = torch.stack([spread_logits(size, seed) for seed in range(len(samplings))])
    logits[1, 5], logits[2, 9], logits[1, 6] = math.nan, math.inf, -math.inf
    sampler = DeviceSampler(len(samplings), size, DEVICE)
    sampler.allow_adjustments()
    for slot, sampling in enumerate(samplings):
        sampler.assign(slot, sampling, 0, tokens, num_prompt)
    expected = torch.tensor(
        [
            adjusted(x, tokens, num_prompt, sampling)
            for x, sampling in zip(logits.tolist(), samplings, strict=True)
        ]
    )
    sampler.flush()
    slots, positions = int32(list(range(len(samplings)))), int32([len(tokens)] * len(samplings))
    out = torch.empty(logits.shape, device=DEVICE)
    assert sampler._bias is not None and sampler._seen is not None
    _store_adjusted[(len(samplings),)](
        logits.to(DEVICE), slots, positions, sampler._table, sampler._bias, sampler._seen,
        sampler.masks, size, out, SIZE=128,
    )  # fmt: skip
    expected.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)  # both make it invalid
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_a_sampled_id_is_penalised_from_the_next_position_on() -> None:
    samplings = [params(0.0, frequency_penalty=0.4), params(0.0, repetition_penalty=1.5)]
    logits = torch.stack((spread_logits(50), spread_logits(50, 1)))
    table = torch.zeros(2, 12, dtype=torch.int64)
    table[:, :4] = torch.tensor([[1, 2, 3, 4], [4, 4, 2, 9]])
    cpu, device = Sampler(2, 50, CPU), DeviceSampler(2, 50, DEVICE)
    for slot, sampling in enumerate(samplings):
        cpu.assign(slot, sampling, 0)
        device.assign(slot, sampling, 0, table[slot, :4].tolist(), 3)
    device.flush()
    sampled = []
    for length in range(4, 11):
        expected, _ = cpu.sample(logits, [0, 1], [length] * 2, table, [3, 3])
        table[:, length] = expected
        ids = int32([0, 0])
        device.sample(
            logits.to(DEVICE), int32([0, 1]), int32([length] * 2), ids,
            torch.zeros(2, device=DEVICE), device.mode([0, 1]),
        )  # fmt: skip
        assert ids.tolist() == expected.tolist()
        sampled.append(tuple(ids.tolist()))
    assert len(set(sampled)) > 1


def test_filters_apply_to_the_ids_that_a_mask_allows() -> None:
    size = 1000
    x = spread_logits(size)
    allowed = torch.arange(size) % 3 == 1
    sampler = DeviceSampler(3, size, DEVICE)
    samplings = [params(0.0, grammar="g"), params(top_k=4, grammar="g"), params(0.0)]
    for slot, sampling in enumerate(samplings):
        sampler.assign(slot, sampling, slot, [0] * 5, 5)
    sampler.flush()
    sampler.allow_adjustments()
    padded = torch.nn.functional.pad(allowed.long(), (0, -size % 32)).view(-1, 32)
    words = (padded << torch.arange(32)).sum(1)
    sampler.masks[:2] = (words - ((words >> 31) << 32)).int().to(DEVICE)
    ids = int32([0] * 3)
    logits = x.repeat(3, 1)
    assert sampler.mode([0, 1, 2]) is Mode.ADJUSTED
    sampler.sample(
        logits.to(DEVICE), int32([0, 1, 2]), int32([5] * 3), ids,
        torch.zeros(3, device=DEVICE), Mode.ADJUSTED,
    )  # fmt: skip
    masked = x.masked_fill(~allowed, -math.inf)
    best = masked.topk(4).indices.tolist()
    assert ids[0] == best[0] and int(ids[1]) in best and ids[2] == x.argmax()
    kept = distance(masked, samplings[1]).view(torch.int32) <= int(sampler.limits[1])
    assert set(kept.nonzero().flatten().tolist()) == set(best)


# --- logprobs and slots ---------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_logits_and_only_for_rows_that_request_them() -> None:
    logits = torch.stack([spread_logits(5000, seed) for seed in range(4)])
    logits[2] = -math.inf
    logprobs = {"num_logprobs": 0}
    samplings = [
        params(**logprobs),
        params(),
        params(**logprobs),
        params(top_k=3, presence_penalty=9, **logprobs),
    ]
    drawn = Drawn(logits, samplings)
    assert drawn.mode is Mode.ADJUSTED
    own = logits.log_softmax(-1)[torch.arange(4), torch.tensor(drawn.ids)]
    assert drawn.logprobs[0] == pytest.approx(float(own[0]), abs=LOGPROB_TOLERANCE)
    assert math.isnan(drawn.logprobs[1])
    assert (drawn.ids[2], drawn.logprobs[2]) == (0, 0.0)
    assert drawn.logprobs[3] == pytest.approx(float(own[3]), abs=LOGPROB_TOLERANCE)


def greedy(sampler: DeviceSampler, logits: Tensor, slot: int, position: int) -> int:
    """The id of one row, sampled alone."""
    ids = int32([-7])
    sampler.sample(
        logits[None].to(DEVICE), int32([slot]), int32([position]), ids,
        torch.zeros(1, device=DEVICE), sampler.mode([slot]),
    )  # fmt: skip
    return int(ids)


def test_a_slot_keeps_nothing_of_its_previous_request() -> None:
    sampler = DeviceSampler(2, 64, DEVICE)
    sampler.assign(1, params(top_k=3, frequency_penalty=1.0), 1, [1, 2], 1)
    sampler.flush()
    assert sampler.mode([0]) is Mode.PLAIN and sampler.mode([0, 1]) is Mode.ADJUSTED
    sampler.assign(1, params(top_p=0.5), 1, [3], 1)
    assert sampler.mode([0, 1]) is Mode.FILTERED
    logits = torch.linspace(0.0, 0.63, 64)  # each id is the best once those above it are penalised
    penalised = params(0.0, frequency_penalty=1.0)
    sampler.assign(1, penalised, 1, [3, 63, 63], 1)
    sampler.flush()
    assert greedy(sampler, logits, slot=1, position=3) == 62
    sampler.assign(1, penalised, 1, [3, 61], 1)
    sampler.flush()
    assert greedy(sampler, logits, slot=1, position=2) == 63
    sampler.assign(1, params(0.0), 1, [3], 1)
    sampler.flush()
    assert sampler.mode([0, 1]) is Mode.PLAIN
    assert [greedy(sampler, logits, slot=1, position=at) for at in (1, 2)] == [63, 63]


def test_rows_that_pad_a_graph_are_greedy_and_affect_no_sequence() -> None:
    sampler = DeviceSampler(2, 64, DEVICE, max_rows=3)
    for slot in (0, 1):
        sampler.assign(slot, params(0.0, frequency_penalty=9.0), 1, [1], 1)
    sampler.flush()
    ids, logits = int32([0] * 3), spread_logits(64)
    sampler.sample(
        logits.repeat(3, 1).to(DEVICE), int32([0, 2, 2]), int32([1] * 3), ids,
        torch.zeros(3, device=DEVICE), sampler.mode([0, 2]),
    )  # fmt: skip
    best, second = logits.topk(2).indices.tolist()
    assert ids.tolist() == [best] * 3
    assert greedy(sampler, logits, slot=0, position=2) == second  # its best has come once
    assert greedy(sampler, logits, slot=1, position=1) == best
    assert greedy(sampler, logits, slot=2, position=2) == best  # that of the rows that pad


@pytest.mark.parametrize(
    ("options", "is_fused"),
    [
        ({}, True),
        ({"bad_words": ((1,), (2,)), "min_tokens": 3, "stop_token_ids": (1,)}, True),
        ({"bad_words": ((1, 2),)}, False),
        ({"min_tokens": 3, "stop_token_ids": tuple(range(21))}, False),
        ({"stop_token_ids": tuple(range(21))}, True),
        ({"grammar": "g", "logit_bias": ((1, 1.0),), "frequency_penalty": 1.0}, True),
        ({"grammar": "g", "allowed_token_ids": (1,)}, False),
    ],
)
def test_can_fuse_is_true_of_what_kernels_support(
    options: dict[str, object], is_fused: bool
) -> None:
    assert can_fuse(params(**options)) is is_fused  # type: ignore[arg-type]
