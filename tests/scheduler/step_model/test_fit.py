"""Fits to steps of a device whose coefficients are known."""

from dataclasses import replace
from random import Random

import pytest

from penstock.scheduler.stats import StepClass
from penstock.scheduler.step_model.fit import MIN_STEPS, TooFewSteps, fit
from penstock.scheduler.step_model.least_squares import NormalEquations
from penstock.scheduler.step_model.live import OnlineFit
from penstock.scheduler.step_model.model import StepModel
from tests.support.made_up_steps import KNEE, known_model, made_up_amounts, made_up_steps


def off_by(model: StepModel, *, runs_ahead: bool, seed: int = 99) -> float:
    """The largest relative error on new steps without noise."""
    random, truth, errors = Random(seed), known_model(runs_ahead=runs_ahead), []
    for _ in range(300):
        _, amounts = made_up_amounts(random)
        right = truth.cycle_s(amounts)
        errors.append(abs(model.cycle_s(amounts) / right - 1))
    return max(errors)


def test_least_squares_are_never_negative_and_as_good_as_any() -> None:
    random = Random(1)
    rows = [[random.random() for _ in range(4)] for _ in range(50)]
    values = [2 * a - 1 * b + 0.5 * c + random.random() for a, b, c, _ in rows]
    equations = NormalEquations(4)
    for row, value in zip(rows, values, strict=True):
        equations.add(row, value, 1.0)

    def cost(solution: list[float]) -> float:
        pairs = zip(rows, values, strict=True)
        return sum(
            (sum(a * x for a, x in zip(row, solution, strict=True)) - value) ** 2
            for row, value in pairs
        )

    best = equations.solve()
    assert min(best) == 0.0 and best[0] > 1.0
    for _ in range(200):
        other = [max(0.0, x + random.uniform(-0.1, 0.1)) for x in best]
        assert cost(other) >= cost(best) - 1e-9


def test_columns_that_are_multiples_of_each_other_do_no_harm() -> None:
    equations = NormalEquations(3)
    for x in range(1, 20):
        equations.add((1.0, x, 3.0 * x), 5.0 + 2.0 * x, 1.0)
    a, b, c = equations.solve()
    assert a == pytest.approx(5.0, abs=1e-3) and b + 3 * c == pytest.approx(2.0, abs=1e-4)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_fit_without_noise_predicts_every_step(runs_ahead: bool) -> None:
    model = fit(list(made_up_steps(600, runs_ahead=runs_ahead)), runs_ahead=runs_ahead)
    assert off_by(model, runs_ahead=runs_ahead) < 0.02
    assert min(*model.device, *model.host) >= 0.0
    assert model.knee == KNEE
    assert max(error.mape for error in model.errors.values()) < 0.01


def test_steps_that_something_held_up_do_not_mislead_the_fit() -> None:
    def noise(random: Random) -> float:
        held_up = random.random() < 0.05
        return random.gauss(1.0, 0.03) * (5.0 if held_up else 1.0)

    model = fit(list(made_up_steps(1500, noise=noise)), runs_ahead=False)
    assert off_by(model, runs_ahead=False) < 0.1


def test_the_error_that_a_model_tells_is_the_one_that_new_steps_have() -> None:
    def noise(random: Random) -> float:
        return random.gauss(1.0, 0.08)

    model = fit(list(made_up_steps(1500, noise=noise)), runs_ahead=False)
    again: dict[StepClass, list[float]] = {}
    for sample in made_up_steps(1500, seed=5, noise=noise):
        predicted_s = model.cycle_s(sample.amounts)
        again.setdefault(sample.kind, []).append(sample.cycle_s / predicted_s)
    for kind, error in model.errors.items():
        ratios = sorted(again[kind])
        mape = sum(abs(1 / ratio - 1) for ratio in ratios) / len(ratios)
        assert error.mape == pytest.approx(mape, rel=0.3)
        assert error.bias < 0.05
        assert error.ratio_at(0.1) == pytest.approx(ratios[len(ratios) // 10], rel=0.05)
        assert error.ratio_at(0.1) < error.ratio_at(0.5) < error.ratio_at(0.9)


def test_a_model_says_where_it_was_not_checked() -> None:
    samples = list(made_up_steps(800, max_sequences=16))
    model = fit([s for s in samples if s.kind is StepClass.DECODE], runs_ahead=False)
    decode = next(s for s in samples if s.kind is StepClass.DECODE and s.amounts.sequences == 8)
    assert model.outside(decode.amounts, StepClass.DECODE) == ()
    larger = decode.amounts._replace(tokens=64, sequences=64)
    assert model.outside(larger, StepClass.DECODE) == ("tokens", "sequences")
    assert model.outside(decode.amounts, StepClass.MIXED) == ("class",)


def test_a_handful_of_steps_is_refused() -> None:
    with pytest.raises(TooFewSteps, match="12 steps are too few"):
        fit(list(made_up_steps(12)), runs_ahead=False)
    fit(list(made_up_steps(MIN_STEPS)), runs_ahead=False)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_fit_while_serving_becomes_as_good_as_one_afterwards(runs_ahead: bool) -> None:
    online = OnlineFit(runs_ahead=runs_ahead, knee=KNEE)
    for sample in made_up_steps(6000, runs_ahead=runs_ahead):
        online.observe(sample)
    assert off_by(online.model(), runs_ahead=runs_ahead) < 0.08


def test_a_fit_while_serving_follows_a_device_that_becomes_slower() -> None:
    online = OnlineFit(runs_ahead=False, knee=KNEE)

    def slower_by() -> float:
        amounts = next(iter(made_up_steps(1, seed=5))).amounts
        truth = known_model(runs_ahead=False).time_of(amounts).device_s
        return online.model().time_of(amounts).device_s / truth

    for sample in made_up_steps(2000):
        online.observe(sample)
    assert 0.9 < slower_by() < 1.1
    for sample in made_up_steps(20_000, seed=2, noise=lambda _: 1.5):
        online.observe(sample)
    assert 1.3 < slower_by() < 1.6


def test_what_is_no_sum_is_corrected_where_there_were_steps_enough() -> None:
    """A device that takes half as long again for 32 decodes, as one whose caches are full does."""
    samples = []
    for sample in made_up_steps(3000):
        is_slow = sample.kind is StepClass.DECODE and 23 <= sample.amounts.tokens < 46
        seconds = (sample.device_s or 0.0) * (1.5 if is_slow else 1.0)
        samples.append(sample._replace(device_s=seconds, cycle_s=seconds + sample.host_s))
    model = fit(samples, runs_ahead=False)
    plain = replace(model, corrections={})

    def off_at(tokens: int, model: StepModel) -> float:
        alike = [s for s in samples if s.kind is StepClass.DECODE and s.amounts.tokens == tokens]
        return max(abs(model.time_of(s.amounts).device_s / (s.device_s or 1.0) - 1) for s in alike)

    assert off_at(32, model) < 0.12 < off_at(32, plain)
    assert off_at(8, model) < 0.2
