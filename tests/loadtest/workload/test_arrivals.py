"""Arrivals keep their rate, their burstiness and their ramp, whatever the seed."""

from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.loadtest.workload.config import Ramp, RampStrategy, arrival_times
from penstock.scheduler.errors import InvalidConfig

INF = float("inf")


@settings(max_examples=40)
@given(
    seed=st.integers(),
    rate=st.floats(0.01, 1e4),
    burstiness=st.floats(0.1, 20.0),
    count=st.integers(1, 60),
)
def test_times_never_go_back_and_scale_with_the_rate(
    seed: int, rate: float, burstiness: float, count: int
) -> None:
    times = arrival_times(seed, count, rate, burstiness=burstiness)
    assert times == sorted(times) and len(times) == count and times[0] >= 0
    twice = arrival_times(seed, count, 2 * rate, burstiness=burstiness)
    assert twice == pytest.approx([at / 2 for at in times])


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float) -> None:
    times = arrival_times(2, 20_000, 50.0, burstiness=burstiness)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    # A gamma's deviation is its mean by the square root of its shape.
    assert fmean(gaps) == pytest.approx(0.02, rel=0.05)
    assert pstdev(gaps) == pytest.approx(0.02 / burstiness**0.5, rel=0.07)


@settings(max_examples=40)
@given(
    strategy=st.sampled_from([*RampStrategy]),
    start=st.floats(0.1, 100.0),
    end=st.floats(0.1, 100.0),
    share=st.floats(0, 1),
)
def test_a_ramp_starts_and_ends_where_it_says_and_stays_between(
    strategy: RampStrategy, start: float, end: float, share: float
) -> None:
    ramp = Ramp(strategy=strategy, start_rps=start, end_rps=end)
    assert ramp.rate_at(0) == pytest.approx(start)
    assert ramp.rate_at(1) == pytest.approx(end)
    low, high = sorted((start, end))
    assert low * 0.999 <= ramp.rate_at(share) <= high * 1.001


def test_gaps_shrink_as_a_ramp_rises() -> None:
    for strategy in RampStrategy:
        ramp = Ramp(strategy=strategy, start_rps=1.0, end_rps=100.0)
        times = arrival_times(1, 4000, INF, burstiness=50.0, ramp=ramp)
        assert (times[200] - times[0]) / 200 > 0.1
        assert (times[-1] - times[-201]) / 200 < 0.015
    exponential = Ramp(strategy=RampStrategy.EXPONENTIAL, start_rps=1.0, end_rps=100.0)
    assert exponential.rate_at(0.5) == pytest.approx(10.0)


def test_a_ramp_from_zero_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="--ramp-up-start-rps is 0"):
        Ramp(strategy=RampStrategy.LINEAR, start_rps=0.0, end_rps=5.0)
