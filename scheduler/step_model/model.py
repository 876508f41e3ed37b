"""`StepModel`: predicts the time of a step, and knows where it was checked and how far it was off.

A device's time is a sum of what it reads and computes, each at its own rate (see `amounts`), and so
is the host's. Where the executor runs ahead the two overlap, and the longer one counts.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from math import log2
from operator import mul
from typing import NamedTuple

from penstock.scheduler.stats import StepClass
from penstock.scheduler.step_model.amounts import Amounts, device_row, host_row

# Shares of the held-out steps at which a model keeps its residuals.
QUANTILES = (0.005, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.995)
# A step may have a tenth more or less than any that the fit saw, and still count as seen.
_MARGIN = 0.1
_RANGED = ("tokens", "decode_kv_bytes", "prefill_kv_bytes", "sequences")


class StepTime(NamedTuple):
    device_s: float
    host_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassError:
    """How far predictions were off for steps of one class that the fit had not seen.

    mape: the mean absolute error, relative to the measured time. bias: the largest mean error,
    relative too, of any part of the steps that was held out: what does not average out over a run.
    ratios: measured over predicted, at QUANTILES; empty where nothing was measured.
    """

    num_steps: int
    mape: float
    bias: float
    ratios: tuple[float, ...] = ()

    def ratio_at(self, share: float) -> float:
        """Measured over predicted at this share of the steps, from 0 to 1. 1 if none was measured:
        drawn with a uniform share, it gives the spread that the measured steps had. The very few
        that were longest are left out: something stopped them, and would be all that one sees."""
        if not self.ratios:
            return 1.0
        share = min(max(share, QUANTILES[0]), QUANTILES[-1])
        index = min(max(bisect_right(QUANTILES, share) - 1, 0), len(QUANTILES) - 2)
        low, high = QUANTILES[index], QUANTILES[index + 1]
        a, b = self.ratios[index], self.ratios[index + 1]
        return a + (b - a) * (share - low) / (high - low)


class Range(NamedTuple):
    """The least and the most that the fit saw."""

    low: float
    high: float

    def contains(self, value: float) -> bool:
        return self.low * (1 - _MARGIN) <= value <= self.high * (1 + _MARGIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Coefficients in seconds, in the order of DEVICE_UNITS and HOST_UNITS; none is negative.

    knee: see `device_row`. runs_ahead: as the executor's. corrections: by class, at 1, 2, 4, ...
    tokens: what the device's sum is multiplied by, for what is no sum, such as tiles and caches;
    between two of them it changes evenly, and beyond the last it stays. errors, covered: by class;
    a class that is missing was never seen. covered: by the name of an amount.
    """

    device: tuple[float, ...]
    host: tuple[float, ...]
    knee: int
    runs_ahead: bool
    corrections: dict[StepClass, tuple[float, ...]] = field(default_factory=dict)
    errors: dict[StepClass, ClassError] = field(default_factory=dict)
    covered: dict[StepClass, dict[str, Range]] = field(default_factory=dict)

    def time_of(self, amounts: Amounts) -> StepTime:
        time = self.sums_of(amounts)
        if not self.corrections:
            return time
        factor = self.correction(class_of_amounts(amounts), amounts.tokens)
        return time._replace(device_s=factor * time.device_s)

    def sums_of(self, amounts: Amounts) -> StepTime:
        """Without corrections."""
        device = sum(map(mul, self.device, device_row(amounts, self.knee)))
        return StepTime(device, sum(map(mul, self.host, host_row(amounts))))

    def correction(self, kind: StepClass, num_tokens: int) -> float:
        """The factor of the device's time of a step of this class, padding included."""
        factors = self.corrections.get(kind)
        if not factors:
            return 1.0
        at = log2(max(1, num_tokens))
        low = int(at)
        if low >= len(factors) - 1:
            return factors[-1]
        return factors[low] + (factors[low + 1] - factors[low]) * (at - low)

    def cycle_s(self, amounts: Amounts) -> float:
        """From one step's end to the next one's, while there is work."""
        time = self.time_of(amounts)
        return max(time) if self.runs_ahead else sum(time)

    def outside(self, amounts: Amounts, kind: StepClass) -> tuple[str, ...]:
        """The amounts of a step of this class that are outside of what the fit saw; ("class",)
        where it saw no step of the class."""
        ranges = self.covered.get(kind)
        if ranges is None:
            return ("class",)
        return tuple(
            name for name, seen in ranges.items() if not seen.contains(getattr(amounts, name))
        )


def class_of_amounts(amounts: Amounts) -> StepClass:
    """As `class_of` says of the work."""
    if not amounts.prefill_tokens:
        return StepClass.DECODE
    return StepClass.MIXED if amounts.sequences > amounts.chunks else StepClass.PREFILL


def ranges_of(steps: list[Amounts]) -> dict[str, Range]:
    """The ranges that these steps cover, by the name of the amount."""
    return {
        name: Range(
            min(getattr(each, name) for each in steps), max(getattr(each, name) for each in steps)
        )
        for name in _RANGED
    }
