"""The table of predicted beside measured: what of an error is the machine's."""

import pytest

from penstock.scheduler.stats import StepClass
from penstock.scheduler.step_model.amounts import DEVICE_UNITS, Amounts
from penstock.scheduler.step_model.model import QUANTILES, ClassError, StepModel
from penstock.scheduler.step_model.samples import StepSample
from tests.bench.server.predicted import speed_of

DECODE = Amounts(
    tokens=1,
    weight_bytes=1,
    decode_kv_bytes=1,
    prefill_kv_bytes=0,
    attention_flops=0,
    sequences=1,
    chunks=0,
    sampled=1,
    prefill_tokens=0,
)


def model_of(ratio: float) -> StepModel:
    """Of steps of 10 ms, times this ratio where a simulation draws one."""
    error = ClassError(num_steps=99, mape=0.0, bias=0.0, ratios=(ratio,) * len(QUANTILES))
    device = tuple(0.01 if unit == "step" else 0.0 for unit in DEVICE_UNITS)
    return StepModel(
        device=device, host=(0.0,) * 4, knee=8, runs_ahead=False, errors={StepClass.DECODE: error}
    )


def steps(num: int, seconds: float) -> list[StepSample]:
    return [
        StepSample(
            number=number,
            kind=StepClass.DECODE,
            amounts=DECODE,
            device_s=seconds,
            host_s=0.0,
            cycle_s=seconds,
        )
        for number in range(num)
    ]


def test_the_speed_of_a_load_is_what_its_steps_took_beside_what_a_simulation_gives_them() -> None:
    for ratio in (1.0, 1.25):
        speed = speed_of(model_of(ratio), steps(9, 0.02))
        assert speed[StepClass.DECODE] == pytest.approx(2 / ratio)
        assert speed[StepClass.MIXED] == pytest.approx(2 / ratio)  # of all steps, as it has none


def test_a_load_without_steps_has_the_speed_of_the_model() -> None:
    assert set(speed_of(model_of(1.0), []).values()) == {1.0}
