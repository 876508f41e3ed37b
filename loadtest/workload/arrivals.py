"""Arrival times: gamma-distributed gaps, at a constant rate or a ramp.

All draws have mean 1 and come from one generator: another rate stretches the same arrivals, and
more requests only append to them.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from penstock.loadtest.exit_status import require


class RampStrategy(StrEnum):
    """How the rate changes from start to end: by equal steps, or by equal factors."""

    LINEAR = "linear"
    EXPONENTIAL = "exponential"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """Rates in requests per second. As in vLLM, the rate follows the share of requests sent."""

    strategy: RampStrategy
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        for flag, rate in (
            ("--ramp-up-start-rps", self.start_rps),
            ("--ramp-up-end-rps", self.end_rps),
        ):
            require(0 < rate < math.inf, flag, rate, "more than 0 and finite")

    def rate_at(self, share: float) -> float:
        """The rate when this share of the requests, from 0 to 1, has been sent."""
        if self.strategy is RampStrategy.LINEAR:
            return self.start_rps + (self.end_rps - self.start_rps) * share
        return self.start_rps * math.pow(self.end_rps / self.start_rps, share)


def arrival_times(
    seed: int, count: int, rate: float, *, burstiness: float = 1.0, ramp: Ramp | None = None
) -> list[float]:
    """Seconds from the start. An infinite rate is all at once; a ramp replaces the rate.

    burstiness: the shape of the gamma distribution: 1 is a Poisson process, less is bursty, more
    is even.
    """
    if math.isinf(rate) and ramp is None:
        return [0.0] * count
    random = Random(f"{seed}/arrivals")
    times, now = [], 0.0
    for index in range(count):
        current = ramp.rate_at(index / max(1, count - 1)) if ramp else rate
        now += random.gammavariate(burstiness, 1 / burstiness) / current
        times.append(now)
    return times
