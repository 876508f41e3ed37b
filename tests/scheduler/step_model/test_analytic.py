"""The model of a datasheet, against the figures of the launch by launch estimate."""

import pytest

from penstock.scheduler.step_model.amounts import Amounts
from penstock.scheduler.step_model.analytic import analytic_model

# Llama-3.1-8B in bfloat16 on an H200.
KV_BYTES, WEIGHT_BYTES, FLOPS_PER_TOKEN = 131_072, 15_010_000_000, 2 * 6_980_000_000
MODEL = analytic_model(
    bandwidth=4.8e12,
    flops=9.89e14,
    weight_bytes=WEIGHT_BYTES,
    flops_per_token=FLOPS_PER_TOKEN,
    num_layers=32,
)


def decodes(num: int, context: int) -> Amounts:
    return Amounts(num, WEIGHT_BYTES, num * context * KV_BYTES, 0, 0, num, 0, num, 0)


def chunk(num: int) -> Amounts:
    pairs = num * (num + 1) // 2
    return Amounts(num, WEIGHT_BYTES, 0, num * KV_BYTES, 4 * 32 * 4096 * pairs, 1, 1, 1, num)


# tests/bench/gpu/ESTIMATE.md: what it expects, launch by launch.
@pytest.mark.parametrize(
    ("amounts", "expected_ms"),
    [(decodes(1, 512), 3.79), (decodes(256, 1024), 15.2), (chunk(1024), 21.5)],
)
def test_it_agrees_with_the_estimate_launch_by_launch(amounts: Amounts, expected_ms: float) -> None:
    assert MODEL.time_of(amounts).device_s * 1e3 == pytest.approx(expected_ms, rel=0.12)


def test_multiplying_hides_behind_reading_up_to_the_knee() -> None:
    few, knee, many = (
        MODEL.time_of(decodes(num, 0)).device_s - num * 2e-6
        for num in (1, MODEL.knee, 2 * MODEL.knee)
    )
    assert few == pytest.approx(knee)
    read_s = WEIGHT_BYTES / (0.85 * 4.8e12)
    assert many - knee == pytest.approx(read_s, rel=0.01)  # as long again as reading
