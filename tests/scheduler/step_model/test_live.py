"""`LiveStepModel`: predictions of a server that learns from its steps."""

from dataclasses import replace
from random import Random

import pytest

from penstock.scheduler.stats import StepClass
from penstock.scheduler.step_model.live import LiveStepModel
from penstock.scheduler.step_model.model import ClassError, StepModel
from tests.support.made_up_steps import (
    known_model,
    made_up_amounts,
    made_up_steps,
    served_model,
)


def off_by(live: LiveStepModel, *, factor: float = 1.0) -> float:
    """The mean relative error on new steps, of a device that takes `factor` as long."""
    random, truth, errors = Random(5), known_model(runs_ahead=live.served.runs_ahead), []
    for _ in range(300):
        kind, amounts = made_up_amounts(random)
        predicted_s = live.predict(amounts, kind)
        assert predicted_s is not None
        errors.append(abs(predicted_s / truth.cycle_s(amounts) / factor - 1))
    return sum(errors) / len(errors)


def learn(live: LiveStepModel, num: int, *, seed: int = 0, factor: float = 1.0) -> None:
    steps = made_up_steps(num, seed=seed, runs_ahead=live.served.runs_ahead, noise=lambda _: factor)
    for sample in steps:
        live.observe(sample)


def wrong_model(*, runs_ahead: bool) -> StepModel:
    """Twice as long a step, a tenth of the time of contexts."""
    truth = known_model(runs_ahead=runs_ahead)
    device = [2 * truth.device[0], *truth.device[1:4], *(c / 10 for c in truth.device[4:])]
    return replace(truth, device=tuple(device))


def test_without_a_model_that_was_made_before_nothing_is_predicted_at_first() -> None:
    live = LiveStepModel(served_model())
    _, amounts = made_up_amounts(Random(0))
    assert all(live.predict(amounts, kind) is None for kind in StepClass)
    assert all(live.expected(kind) is None and not live.is_trusted(kind) for kind in StepClass)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_it_becomes_as_good_as_the_steps_that_it_saw(runs_ahead: bool) -> None:
    live = LiveStepModel(served_model(runs_ahead=runs_ahead))
    learn(live, 3000)
    assert off_by(live) < 0.05
    assert all(live.is_trusted(kind) for kind in StepClass)


def test_a_calibrated_model_predicts_from_the_first_step_on() -> None:
    start = known_model(runs_ahead=False)
    errors = {kind: ClassError(num_steps=99, mape=0.03, bias=0.01) for kind in StepClass}
    live = LiveStepModel(served_model(), replace(start, errors=errors))
    assert off_by(live) < 1e-9
    assert all(live.is_trusted(kind) for kind in StepClass)


def test_a_model_that_was_made_before_and_is_wrong_is_left_behind() -> None:
    live = LiveStepModel(served_model(), wrong_model(runs_ahead=False))
    before = off_by(live)
    assert before > 0.2 and not live.is_trusted(StepClass.MIXED)
    learn(live, 2000)
    assert off_by(live) < before / 4


def test_a_machine_that_becomes_slower_is_followed_within_a_hundred_steps() -> None:
    live = LiveStepModel(served_model(), known_model(runs_ahead=False))
    learn(live, 2000)
    learn(live, 300, seed=1, factor=1.6)  # of which a third are decodes, and few of those count
    assert off_by(live, factor=1.6) < 0.12


def test_the_long_end_is_where_two_in_a_hundred_steps_are_longer() -> None:
    live = LiveStepModel(served_model(), known_model(runs_ahead=False))
    draw = Random(3)
    for sample in made_up_steps(12_000, noise=lambda _: draw.uniform(0.8, 1.2)):
        live.observe(sample)
    expected = live.expected(StepClass.MIXED)
    assert expected is not None
    assert 1.08 < expected.tail < 1.3
    assert 0.93 < expected.mean < 1.07


def test_a_step_that_was_stopped_for_a_minute_changes_little() -> None:
    live = LiveStepModel(served_model(), known_model(runs_ahead=False))
    learn(live, 2000)
    for sample in made_up_steps(3, seed=9, noise=lambda _: 10_000.0):
        live.observe(sample)
    learn(live, 200, seed=2)
    assert off_by(live) < 0.1
