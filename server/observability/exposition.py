"""Prometheus's text format, rendered fast: every stream waits while a scrape is answered.

Between two scrapes only values change. So prometheus-client renders the lines once, and later
scrapes fill in the values.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

# A number, or one for each value of the label (a text) or of the labels (a tuple of texts).
Values = float | Mapping[Any, float]


def counter(name: str, help_text: str, values: Values, *labels: str) -> Metric:
    """Returns a counter of ours, whose name on `/metrics` has penstock_ before it."""
    return with_samples(CounterMetricFamily(f"penstock_{name}", help_text, labels=labels), values)


def gauge(name: str, help_text: str, values: Values, *labels: str) -> Metric:
    """Returns a gauge of ours, whose name on `/metrics` has penstock_ before it."""
    return with_samples(GaugeMetricFamily(f"penstock_{name}", help_text, labels=labels), values)


def with_samples(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    """Returns the family with a sample for each of the values."""
    by_labels = values if isinstance(values, Mapping) else {(): values}
    for labels, value in by_labels.items():
        family.add_metric((labels,) if isinstance(labels, str) else labels, value)
    return family


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
        self._rendered: dict[str, _Rendered] = {}  # by the name of the family

    def text(self, metrics: Iterable[Metric]) -> str:
        """The same text as prometheus-client's `generate_latest`."""
        return "".join(map(self._text_of, metrics))

    def _text_of(self, metric: Metric) -> str:
        labels = [(sample.name, sample.labels) for sample in metric.samples]
        rendered = self._rendered.get(metric.name)
        if rendered is None or rendered.labels != labels:
            rendered = self._rendered[metric.name] = _Rendered(labels, Lines(metric))
        return rendered.lines.filled(number(sample.value) for sample in metric.samples)


def number(value: float) -> str:
    """As prometheus-client formats it."""
    formatted: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return formatted


class _Rendered(NamedTuple):
    """labels: of each sample, its name and its labels."""

    labels: list[tuple[str, dict[str, str]]]
    lines: Lines


class _SingleFamily(Collector):
    """A collector of one metric family."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)
