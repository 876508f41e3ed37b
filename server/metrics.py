"""Step snapshots and request times to Prometheus.

What happens is added to plain numbers; Prometheus's own objects are made when somebody scrapes. So
a step costs one call, and a token a bisection, with no lock and no label look-up.
"""

import bisect
import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest

from engine.executor import ModelInfo
from engine.messages import StepReport
from scheduler.types import RequestId

# From 1 ms, because a small model's token takes less than ten; to 10 min, the clients' patience.
_SECONDS = tuple(
    round(base * scale, 6)
    for scale in (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
    for base in (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.5)
    if base * scale <= 600
)
_STEP_SECONDS = tuple(value / 10 for value in _SECONDS if value <= 100)
_SIZES = tuple(1 << exponent for exponent in range(15))
# The utilization gauges look back so far: long enough to be steady, short enough to be live.
_UTILIZATION_WINDOW_S = 10.0


class Histogram:
    """Counts in buckets, upper bounds inclusive."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """count: as many times as if `value` had been seen."""
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def family(self, name: str, help_text: str) -> HistogramMetricFamily:
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if math.isinf(bound) else str(bound), total))
        family = HistogramMetricFamily(name, help_text)
        family.add_metric([], buckets, self._sum)
        return family


class _Usage(NamedTuple):
    """What is kept of a step for the utilization gauges."""

    started_s: float
    step_s: float
    model_bytes: int
    model_flops: int


class Metrics:
    """Everything that `/metrics` shows. Lives on the event loop, written and read there."""

    def __init__(self) -> None:
        self.ttft = Histogram(_SECONDS)
        self.tpot = Histogram(_STEP_SECONDS)
        self.itl = Histogram(_STEP_SECONDS)
        self.latency = Histogram(_SECONDS)
        self.queue_time = Histogram(_SECONDS)
        self.step_time = Histogram(_STEP_SECONDS)
        self.batch_size = Histogram(_SIZES)
        self.outcomes: Counter[str] = Counter()
        self.responses: Counter[int] = Counter()
        self.model: ModelInfo | None = None
        self._arrivals: dict[RequestId, float] = {}
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._model_bytes = 0
        self._model_flops = 0
        self._last: StepReport | None = None
        self._recent: deque[_Usage] = deque()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def on_submit(self, request_id: RequestId, num_prompt_tokens: int, arrival_s: float) -> None:
        self._prompt_tokens += num_prompt_tokens
        self._arrivals[request_id] = arrival_s

    def on_failure(self, request_id: RequestId) -> None:
        """No final output will come."""
        self._arrivals.pop(request_id, None)

    def on_step(self, report: StepReport) -> None:
        """Takes in one step's report; what only carries aborts is no step."""
        self._last = report
        for output in report.outputs:
            self._generated_tokens += len(output.token_ids)
            if output.finish:
                self._cached_tokens += output.num_cached_tokens
                self._observe_queue(output.request_id, output.finish.first_scheduled_s)
        if not report.step:
            return
        self.step_time.observe(report.step_s)
        self.batch_size.observe(report.work.num_sequences)
        self._model_bytes += report.model_bytes
        self._model_flops += report.model_flops
        self._recent.append(
            _Usage(report.started_s, report.step_s, report.model_bytes, report.model_flops)
        )
        self._forget_old(report.started_s)

    def text(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at a scrape."""
        yield from self._histograms()
        yield from self._counters()
        yield from self._gauges()
        if self.model:
            yield from self._hardware(self.model)

    def _observe_queue(self, request_id: RequestId, first_scheduled_s: float | None) -> None:
        arrival_s = self._arrivals.pop(request_id, None)
        if arrival_s is not None and first_scheduled_s is not None:
            self.queue_time.observe(max(0.0, first_scheduled_s - arrival_s))

    def _forget_old(self, now_s: float) -> None:
        while self._recent and self._recent[0].started_s < now_s - _UTILIZATION_WINDOW_S:
            self._recent.popleft()

    def _histograms(self) -> Iterator[Metric]:
        yield self.ttft.family(
            "penstock_time_to_first_token_seconds", "Request received to first token"
        )
        yield self.tpot.family(
            "penstock_time_per_output_token_seconds", "Mean time of a token after the first"
        )
        yield self.itl.family("penstock_inter_token_latency_seconds", "Gap between two tokens")
        yield self.latency.family(
            "penstock_request_latency_seconds", "Request received to last token"
        )
        yield self.queue_time.family(
            "penstock_queue_time_seconds", "Request received to its first step"
        )
        yield self.step_time.family("penstock_step_time_seconds", "Time of one step")
        yield self.batch_size.family("penstock_batch_size_sequences", "Sequences in one step")

    def _counters(self) -> Iterator[Metric]:
        stats = self._last.stats if self._last else None
        totals = {
            "prompt_tokens": (self._prompt_tokens, "Prompt tokens of accepted requests"),
            "cached_prompt_tokens": (self._cached_tokens, "Prompt tokens that a prefix hit spared"),
            "generated_tokens": (self._generated_tokens, "Tokens sampled"),
            "recomputed_tokens": (
                stats.recomputed_tokens_total if stats else 0,
                "Tokens computed a second time because of preemptions",
            ),
            "preemptions": (stats.preemptions_total if stats else 0, "Sequences preempted"),
            "prefix_query_tokens": (
                stats.prefix_query_tokens_total if stats else 0,
                "Prompt tokens looked up in the prefix cache",
            ),
            "prefix_hit_tokens": (
                stats.prefix_hit_tokens_total if stats else 0,
                "Prompt tokens found in the prefix cache",
            ),
            "model_bytes": (self._model_bytes, "The least bytes that the steps had to read"),
            "model_flops": (self._model_flops, "Floating-point operations of the steps"),
        }
        for name, (value, help_text) in totals.items():
            yield CounterMetricFamily(f"penstock_{name}", help_text, value=value)
        requests = CounterMetricFamily(
            "penstock_requests", "Accepted requests that have ended, by outcome", labels=["outcome"]
        )
        for outcome in ("stop", "length", "abandoned", "failed"):
            requests.add_metric([outcome], self.outcomes[outcome])
        yield requests
        responses = CounterMetricFamily(
            "penstock_http_responses", "HTTP responses by status", labels=["status"]
        )
        for status, count in self.responses.items():
            responses.add_metric([str(status)], count)
        yield responses

    def _gauges(self) -> Iterator[Metric]:
        stats = self._last.stats if self._last else None
        num_blocks = self.model.num_blocks if self.model else 0
        gauges = {
            "running_sequences": (stats.num_running if stats else 0, "Sequences in a slot"),
            "waiting_sequences": (stats.num_waiting if stats else 0, "Sequences in the queue"),
            "kv_used_blocks": (stats.num_used_blocks if stats else 0, "Held by a sequence"),
            "kv_idle_blocks": (stats.num_idle_blocks if stats else 0, "Cached, held by none"),
            "kv_free_blocks": (stats.num_free_blocks if stats else num_blocks, "Empty"),
        }
        for name, (value, help_text) in gauges.items():
            yield GaugeMetricFamily(f"penstock_{name}", help_text, value=value)

    def _hardware(self, model: ModelInfo) -> Iterator[Metric]:
        """What the hardware could do, and how much of it the steps of late have used."""
        peaks = {
            "datasheet": model.peak_bandwidth_bytes_per_s,
            "measured": model.measured_bandwidth_bytes_per_s,
        }
        self._forget_old(time.monotonic())
        busy_s = sum(usage.step_s for usage in self._recent)
        num_bytes = sum(usage.model_bytes for usage in self._recent)
        rate = num_bytes / busy_s if busy_s else 0.0
        yield from _utilization("bandwidth", "bytes_per_second", peaks, rate)
        flops = sum(usage.model_flops for usage in self._recent)
        rate = flops / busy_s if busy_s else 0.0
        yield from _utilization("flops", "per_second", {"datasheet": model.peak_flops_per_s}, rate)
        yield InfoMetricFamily(
            "penstock_model",
            "The model that is served",
            value={
                "architecture": model.architecture,
                "dtype": model.dtype,
                "device": model.device,
            },
        )
        load = GaugeMetricFamily(
            "penstock_startup_seconds", "Time of each phase of the start", labels=["phase"]
        )
        for phase, seconds in model.load_seconds.items():
            load.add_metric([phase], seconds)
        yield load


def _utilization(
    resource: str, unit: str, peaks: dict[str, float | None], rate: float
) -> Iterator[Metric]:
    """The peaks that are known, and the rate as a ratio of each: no peak, no ratio."""
    peak_family = GaugeMetricFamily(
        f"penstock_peak_{resource}_{unit}", f"The hardware's {resource}", labels=["peak"]
    )
    ratio_family = GaugeMetricFamily(
        f"penstock_model_{resource}_utilization_ratio",
        f"What the steps of the last seconds had to use, of the hardware's {resource}",
        labels=["peak"],
    )
    for source, peak in peaks.items():
        if peak:
            peak_family.add_metric([source], peak)
            ratio_family.add_metric([source], rate / peak)
    if any(peaks.values()):
        yield peak_family
        yield ratio_family
