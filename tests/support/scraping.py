"""The samples of /metrics as numbers, for tests."""

from prometheus_client.parser import text_string_to_metric_families

from tests.support.serving import RunningServer


class Scrape:
    """One response of /metrics."""

    def __init__(self, text: str) -> None:
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    @classmethod
    def of(cls, server: RunningServer) -> "Scrape":
        return cls(server.get("/metrics").text)

    def __call__(self, name: str, **labels: str) -> float:
        """A sample of penstock_`name`; 0 if it is missing."""
        return self.full(f"penstock_{name}", **labels)

    def full(self, name: str, **labels: str) -> float:
        return self._samples.get((name, frozenset(labels.items())), 0.0)

    def buckets(self, name: str) -> dict[float, float]:
        """Upper bound -> count, of a histogram without labels."""
        found = {
            float(dict(labels)["le"]): value
            for (sample, labels), value in self._samples.items()
            if sample == f"{name}_bucket"
        }
        return dict(sorted(found.items()))

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self._samples}
