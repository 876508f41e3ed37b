"""Counts in buckets, and the bounds that Penstock's buckets have."""

import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily

from penstock.server.observability.exposition import Lines, number

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
# From here on Prometheus's text has exponents.
_LEAST_EXPONENT = 1_000_000


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
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))

    def told(self) -> list[str]:
        """The values of its samples, as Prometheus's text has them: buckets, count, sum."""
        totals = [f"{n}.0" if n < _LEAST_EXPONENT else number(n) for n in accumulate(self._counts)]
        return [*totals, totals[-1], number(self._sum)]

    @property
    def sum(self) -> float:
        return self._sum


class Gaps:
    """The gaps between an answer's tokens, counted a look at a time.

    All tokens that are taken in one look at the clock have come at `now_s`, and most of them follow
    one that came with all the others too: those gaps are one observation. So a token costs an
    append to `since_s`, of when the one before it came, and nothing else.
    """

    __slots__ = ("_histogram", "now_s", "since_s")

    def __init__(self, histogram: Histogram, now_s: float) -> None:
        self._histogram = histogram
        self.now_s = now_s
        self.since_s: list[float] = []

    def look(self, now_s: float) -> None:
        """What is taken from now on has come at now_s."""
        self.count()
        self.now_s = now_s

    def add_spread(self, since_s: float, num_tokens: int) -> None:
        """Tokens that have come together have come at even distances."""
        self._histogram.observe((self.now_s - since_s) / num_tokens, num_tokens)

    def count(self) -> None:
        """Puts into the histogram what has been taken in this look."""
        if not self.since_s:
            return
        for since_s, num_gaps in self._grouped():
            self._histogram.observe(self.now_s - since_s, num_gaps)
        self.since_s.clear()

    def _grouped(self) -> Iterable[tuple[float, int]]:
        first_s, num_all = self.since_s[0], len(self.since_s)
        if self.since_s.count(first_s) == num_all:  # as good as free, and nearly always so
            return [(first_s, num_all)]
        return Counter(self.since_s).items()


class HistogramFamily:
    """Histograms of one name, each with its labels, and their lines on /metrics."""

    def __init__(
        self,
        name: str,
        help_text: str,
        members: Sequence[tuple[dict[str, str], Histogram]],
    ) -> None:
        """members: all have the same labels."""
        self.name = name
        self.help_text = help_text
        self.members = members
        self._lines = Lines(self.metric())

    def metric(self) -> HistogramMetricFamily:
        metric = HistogramMetricFamily(self.name, self.help_text, labels=tuple(self.members[0][0]))
        for labels, histogram in self.members:
            metric.add_metric(tuple(labels.values()), histogram.buckets(), histogram.sum)
        return metric

    def text(self) -> str:
        """As prometheus-client renders `metric`, without making its thousand objects."""
        return self._lines.filled(
            value for _, histogram in self.members for value in histogram.told()
        )
