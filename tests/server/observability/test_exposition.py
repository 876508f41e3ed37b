"""The fast counting and rendering of /metrics give the same numbers and text as the plain way."""

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from penstock.server.observability.exposition import (
    STEP_SECONDS,
    Gaps,
    Histogram,
    HistogramFamily,
    Renderer,
)
from penstock.server.observability.metrics import Metrics
from tests.support.known_hardware import on_known_hardware

VALUES = st.floats() | st.integers(-(10**12), 10**12) | st.floats(0, 20)
# Model names are directory names, so they may contain nearly any character.
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["100%s", 'a "b"', "back\\slash", "two\nlines", "\u2028", "# HELP"]
)


class _All(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _rendered_by_prometheus_client(metrics: Iterable[Metric]) -> str:
    return generate_latest(_All(metrics)).decode()


def _families(help_text: str, labels: list[str], values: list[float]) -> list[Metric]:
    gauge = GaugeMetricFamily("a_gauge", help_text, labels=["b", "a"])
    counter = CounterMetricFamily("vllm:a_counter", help_text, labels=["a"])
    for label, value in zip(labels, values, strict=False):
        gauge.add_metric([label, "same"], value)
        counter.add_metric([label], value)
    info = InfoMetricFamily("an_info", help_text, value={"a": labels[0]})
    return [gauge, counter, GaugeMetricFamily("plain", help_text, value=values[0]), info]


@settings(max_examples=60)
@given(
    WORDS,
    st.lists(
        st.tuples(
            st.lists(WORDS, min_size=1, max_size=3, unique=True),
            st.lists(VALUES, min_size=1, max_size=3),
        ),
        max_size=4,
    ),
)
def test_every_scrape_has_the_text_that_prometheus_client_renders(
    help_text: str, scrapes: list[tuple[list[str], list[float]]]
) -> None:
    renderer = Renderer()
    for labels, values in scrapes:
        families = _families(help_text, labels, values)
        assert renderer.text(families) == _rendered_by_prometheus_client(families)


OBSERVED = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 10**7)), max_size=20)


@settings(max_examples=40)
@given(WORDS, WORDS, OBSERVED, OBSERVED)
def test_histograms_are_rendered_as_by_prometheus_client(
    help_text: str, label: str, first: list[tuple[float, int]], second: list[tuple[float, int]]
) -> None:
    histograms = Histogram(STEP_SECONDS), Histogram(STEP_SECONDS)
    members = [({"z": label, "a": str(i)}, histogram) for i, histogram in enumerate(histograms)]
    family = HistogramFamily("vllm:seconds", help_text, members)
    for histogram, observed in zip(histograms, (first, second), strict=True):
        for value, count in observed:
            histogram.observe(value, count)
        assert family.text() == _rendered_by_prometheus_client([family.metric()])


@settings(max_examples=50)
@given(
    # Batches: time since the previous, (stream, tokens taken at once), whether a scrape follows.
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.001, 0.0125, 3.0]),
            st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=12),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_grouped_gaps_are_counted_as_if_each_were_observed_alone(
    batches: list[tuple[float, list[tuple[int, int]], bool]],
) -> None:
    grouped, alone, now_s = Histogram(STEP_SECONDS), Histogram(STEP_SECONDS), 1000.0
    gaps, last_s = Gaps(grouped, now_s), dict.fromkeys(range(6), now_s)
    for after_s, taken, is_scraped in batches:
        now_s += after_s
        gaps.advance(now_s)
        for stream, num_tokens in taken:
            for _ in range(num_tokens):
                alone.observe((now_s - last_s[stream]) / num_tokens)
            if num_tokens == 1:
                gaps.since_s.append(last_s[stream])
            else:
                gaps.add_spread(last_s[stream], num_tokens)
            last_s[stream] = now_s
        if is_scraped:
            gaps.count()
    gaps.count()
    assert grouped.buckets() == alone.buckets()
    assert abs(grouped.sum - alone.sum) < 1e-9


def test_prometheus_clients_parser_reads_back_the_whole_scrape() -> None:
    metrics = Metrics('a "model"\n', has_vllm_names=True)
    metrics.on_ready(on_known_hardware())
    metrics.on_response("/v1/completions", "POST", 200)
    metrics.ttft.observe(0.123)
    parsed = {
        family.name: family for family in text_string_to_metric_families(metrics.text().decode())
    }
    own = {family.name: family for family in metrics.families()}
    ours = {name for name in parsed if name.partition("_")[0] not in ("process", "python")}
    # The parser reads an info metric as a gauge.
    assert ours == {n + "_info" if f.type == "info" else n for n, f in own.items()}
    for name in ours & own.keys():
        assert parsed[name].documentation == own[name].documentation
        assert [s[:2] for s in parsed[name].samples] == [s[:2] for s in own[name].samples]
