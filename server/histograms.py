"""Counts in buckets, and the bounds that Penstock's buckets have."""

import bisect
from collections.abc import Iterable, Mapping

from prometheus_client.core import HistogramMetricFamily

# Ten bounds a decade: a quantile read from them is a tenth off at most, in the middle of a bucket.
_DECADE = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
# From 1 ms, because a small model's first token takes less than ten; to 10 min, clients' patience.
REQUEST_SECONDS = tuple(
    round(base * 10.0**exponent, 6)
    for exponent in range(-3, 3)
    for base in _DECADE
    if base * 10.0**exponent <= 600
)
# From 0.1 ms, so that a 2 ms token is told from a 2.5 ms one; to 10 s, a large chunk on a CPU.
STEP_SECONDS = tuple(value / 10 for value in REQUEST_SECONDS if value <= 100)
SIZES = tuple(float(1 << exponent) for exponent in range(18))
# A prompt may be as long as a context of a million tokens.
LENGTHS = tuple(float(1 << exponent) for exponent in range(21))


class Histogram:
    """Upper bounds are inclusive, as Prometheus has them."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """count: as many times as if `value` had been seen."""
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many are no larger), the last bound +Inf."""
        names = (*map(str, self._bounds), "+Inf")
        total, buckets = 0, []
        for name, count in zip(names, self._counts, strict=True):
            total += count
            buckets.append((name, float(total)))
        return buckets

    @property
    def sum(self) -> float:
        return self._sum


def family(name: str, help_text: str, histogram: Histogram) -> HistogramMetricFamily:
    return labelled_family(name, help_text, (), {(): histogram})


def labelled_family(
    name: str,
    help_text: str,
    labels: Iterable[str],
    histograms: Mapping[tuple[str, ...], Histogram],
) -> HistogramMetricFamily:
    """histograms: by the values of the labels."""
    metric = HistogramMetricFamily(name, help_text, labels=tuple(labels))
    for values, histogram in histograms.items():
        metric.add_metric(values, histogram.buckets(), histogram.sum)
    return metric
