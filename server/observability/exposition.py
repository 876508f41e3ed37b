"""Prometheus's text, in a fraction of the time: a stream waits while a scrape is answered.

From one scrape to the next only values change. So prometheus-client renders all lines once, and
after that the values are filled in.
"""

from collections.abc import Iterable
from typing import NamedTuple

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Lines:
    """Those of one family, with a hole where each sample's value belongs."""

    def __init__(self, metric: Metric) -> None:
        """metric: its samples are without times of their own."""
        text = generate_latest(_One(metric)).decode().replace("%", "%%")
        self._format = "\n".join(
            f"{line.rpartition(' ')[0]} %s" if line and not line.startswith("#") else line
            for line in text.split("\n")
        )

    def filled(self, values: Iterable[str]) -> str:
        """values: as `number` writes them, in the order of the samples."""
        return self._format % tuple(values)


class Renderer:
    """Families to text."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}  # by the name of the family

    def text(self, metrics: Iterable[Metric]) -> str:
        """As `generate_latest` has it."""
        return "".join(map(self._text_of, metrics))

    def _text_of(self, metric: Metric) -> str:
        labels = [(sample.name, sample.labels) for sample in metric.samples]
        known = self._known.get(metric.name)
        if known is None or known.labels != labels:
            known = self._known[metric.name] = _Known(labels, Lines(metric))
        return known.lines.filled(number(sample.value) for sample in metric.samples)


def number(value: float) -> str:
    written: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return written


class _Known(NamedTuple):
    """labels: each sample's, and its name."""

    labels: list[tuple[str, dict[str, str]]]
    lines: Lines


class _One(Collector):
    """A registry of one family."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)
