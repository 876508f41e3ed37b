"""Histograms, and Prometheus's text format, rendered fast: every stream waits during a scrape.

Between two scrapes only values change. So prometheus-client renders the lines once, and later
scrapes fill in the values.
"""

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, fields
from functools import partial
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock.server.observability.metric_help import HELP

# A number, or one for each value of the label (a text) or of the labels (a tuple of texts).
Values = float | Mapping[Any, float]


def _with_samples(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    values: Values,
    *labels: str,
    prefix: str = "penstock_",
    help_text: str = "",
) -> Metric:
    """Returns a metric with a sample for each of the values. help_text: of one that is not ours."""
    family = kind(prefix + name, help_text or HELP[name], labels=labels)
    by_labels = values if isinstance(values, Mapping) else {(): values}
    for each, value in by_labels.items():
        family.add_metric((each,) if isinstance(each, str) else each, value)
    return family


counter = partial(_with_samples, CounterMetricFamily)
gauge = partial(_with_samples, GaugeMetricFamily)


class Lines:
    """The lines of one metric family, with a placeholder for the value of each sample."""

    def __init__(self, metric: Metric) -> None:
        """metric: its samples must have no timestamps."""
        text = generate_latest(_SingleFamily(metric)).decode().replace("%", "%%")
        self._format = "\n".join(
            f"{line.rpartition(' ')[0]} %s" if line and not line.startswith("#") else line
            for line in text.split("\n")
        )

    def filled(self, values: Iterable[str]) -> str:
        """values: formatted by `number`, in the order of the samples."""
        return self._format % tuple(values)


class Renderer:
    """Renders metric families as text and keeps their lines for the next scrape."""

    def __init__(self) -> None:
        # By the name of the family: the name and the labels of each sample, and the lines.
        self._rendered: dict[str, tuple[list[tuple[str, dict[str, str]]], Lines]] = {}

    def text(self, metrics: Iterable[Metric]) -> str:
        """The same text as prometheus-client's `generate_latest`."""
        return "".join(map(self._text_of, metrics))

    def _text_of(self, metric: Metric) -> str:
        labels = [(sample.name, sample.labels) for sample in metric.samples]
        before, lines = self._rendered.get(metric.name, (None, None))
        if lines is None or before != labels:
            lines = Lines(metric)
            self._rendered[metric.name] = labels, lines
        return lines.filled(number(sample.value) for sample in metric.samples)


def number(value: float) -> str:
    """As prometheus-client formats it."""
    formatted: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return formatted


class _SingleFamily(Collector):
    """A collector of one metric family."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


# Ten bounds per decade: a quantile read from the middle of a bucket is at most 10 % off.
_DECADE = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
# From 1 ms, because a small model's first token takes less than 10 ms; to 10 min, the longest that
# clients usually wait.
REQUEST_SECONDS = tuple(
    round(base * 10.0**exponent, 6)
    for exponent in range(-3, 3)
    for base in _DECADE
    if base * 10.0**exponent <= 600
)
# From 0.1 ms, which resolves a token of 2 ms from one of 2.5 ms; to 10 s, a large chunk on a CPU.
STEP_SECONDS = tuple(value / 10 for value in REQUEST_SECONDS if value <= 100)
SIZES = tuple(float(1 << exponent) for exponent in range(18))
# Up to a context of a million tokens.
LENGTHS = tuple(float(1 << exponent) for exponent in range(21))
# From none to more than is good.
OCCURRENCES = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
# Prometheus's text writes numbers from this size on with exponents.
_LEAST_EXPONENT = 1_000_000


class Histogram:
    """Counts by bucket, and the sum. Upper bounds are inclusive, as in Prometheus."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """count: how often `value` occurred."""
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, number of values up to it); the last bound is +Inf."""
        names = (*map(str, self._bounds), "+Inf")
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))

    def sample_values(self) -> list[str]:
        """The values of its samples in Prometheus's text format: buckets, count, sum."""
        totals = [f"{n}.0" if n < _LEAST_EXPONENT else number(n) for n in accumulate(self._counts)]
        return [*totals, totals[-1], number(self.sum)]


class Gaps:
    """The times between two tokens of an answer, counted in batches.

    All tokens that the event loop takes at once count as arrived at `now_s`, and the previous
    tokens of most streams arrived together too: equal gaps are one observation. So a token costs
    only an append to `since_s`, of the time at which its predecessor arrived.
    """

    __slots__ = ("_histogram", "now_s", "since_s")

    def __init__(self, histogram: Histogram, now_s: float) -> None:
        self._histogram = histogram
        self.now_s = now_s
        self.since_s: list[float] = []

    def advance(self, now_s: float) -> None:
        """Tokens taken from now on arrived at now_s."""
        self.count()
        self.now_s = now_s

    def add_spread(self, since_s: float, num_tokens: int) -> None:
        """Tokens of one stream that arrived at once count as evenly spaced since `since_s`."""
        self._histogram.observe((self.now_s - since_s) / num_tokens, num_tokens)

    def count(self) -> None:
        """Moves the gaps noted in `since_s` into the histogram."""
        if not self.since_s:
            return
        for since_s, num_gaps in self._grouped():
            self._histogram.observe(self.now_s - since_s, num_gaps)
        self.since_s.clear()

    def _grouped(self) -> Iterable[tuple[float, int]]:
        first_s, num_gaps = self.since_s[0], len(self.since_s)
        if self.since_s.count(first_s) == num_gaps:  # the usual case, and cheap to check
            return [(first_s, num_gaps)]
        return Counter(self.since_s).items()


class HistogramFamily:
    """The histograms that share a name, each with its own labels, and their lines on /metrics."""

    def __init__(
        self, name: str, help_text: str, members: Sequence[tuple[dict[str, str], Histogram]]
    ) -> None:
        """members: (labels, histogram), all with the same label names."""
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
        """The text that prometheus-client renders of `metric`, without its thousand objects."""
        return self._lines.filled(
            value for _, histogram in self.members for value in histogram.sample_values()
        )


def described(name: str, bounds: tuple[float, ...] = REQUEST_SECONDS) -> Histogram:
    """Declares a field of a dataclass that is a histogram without labels."""
    made: Histogram = field(default_factory=partial(Histogram, bounds), metadata={"name": name})
    return made


def described_in(owner: Any) -> list[HistogramFamily]:
    """Returns the families of the histograms among the fields of a dataclass, in their order."""
    return [
        HistogramFamily(f"penstock_{name}", HELP[name], [({}, getattr(owner, each.name))])
        for each in fields(owner)
        if (name := each.metadata.get("name"))
    ]
