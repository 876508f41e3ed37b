"""Prometheus metrics of steps and requests.

Events are added to plain numbers, which become Prometheus metrics only at a scrape. So a step costs
one call and a token one append, with no lock and no label look-up.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import InfoMetricFamily, Metric

from penstock.engine.client import EndCause, EngineClient, ModelInfo, StepReport
from penstock.scheduler.stats import SchedulerStats, StepClass, class_of, plus_counters
from penstock.scheduler.types import RequestId, Started
from penstock.server.observability.exposition import (
    LENGTHS,
    OCCURRENCES,
    SIZES,
    STEP_SECONDS,
    Gaps,
    Histogram,
    HistogramFamily,
    Renderer,
    counter,
    described,
    described_in,
    gauge,
)
from penstock.server.observability.families import (
    adapter_metrics,
    draft_metrics,
    gpu_way_metrics,
    group_metrics,
    quantization_metrics,
    tier_metrics,
    utilization,
)
from penstock.server.observability.metric_help import SCHEDULER_COUNTERS
from penstock.server.observability.predictions import Predictions
from penstock.server.observability.step_window import RecentSteps, Totals
from penstock.server.observability.version import build_info
from penstock.server.observability.vllm_names import (
    HttpResponses,
    histograms_renamed,
    metrics_of_vllm_alone,
    with_vllm_names,
)

_NO_STATS = SchedulerStats()
_OUTCOMES = ("stop", "length", "abandoned", "failed", "refused")
NO_HANDLER = "none"
# A client may invent other methods, and each would become a series of its own.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


@dataclass(slots=True)
class RequestTimes:
    """When a prompt arrived, and when each of its answers started: its first step, or None before.
    Times are in time.monotonic(). predicted_ttft_s: of a request with a target for it, if known."""

    arrival_s: float
    num_prompt_tokens: int
    started_s: list[float | None]
    predicted_ttft_s: float | None = None


@dataclass(eq=False)
class Histograms:
    """The measures of requests and steps, in the order of the page."""

    ttft: Histogram = described("time_to_first_token_seconds")
    tpot: Histogram = described("time_per_output_token_seconds", STEP_SECONDS)
    itl: Histogram = described("inter_token_latency_seconds", STEP_SECONDS)
    latency: Histogram = described("request_latency_seconds")
    queue_time: Histogram = described("queue_time_seconds")
    prefill_time: Histogram = described("prefill_time_seconds")
    decode_time: Histogram = described("decode_time_seconds")
    inference_time: Histogram = described("inference_time_seconds")
    batch_size: Histogram = described("batch_size_sequences", SIZES)
    step_tokens: Histogram = described("step_tokens", SIZES)
    step_progress: Histogram = described("step_progress_tokens", SIZES)
    preemptions_per_answer: Histogram = described("request_preemptions", OCCURRENCES)
    prompt_lengths: Histogram = described("request_prompt_tokens", LENGTHS)
    computed_lengths: Histogram = described("request_computed_prompt_tokens", LENGTHS)
    answers_per_prompt: Histogram = described("request_answers", SIZES)
    max_tokens: Histogram = described("request_max_tokens", LENGTHS)
    answer_lengths: Histogram = described("request_generated_tokens", LENGTHS)


class Metrics(Histograms):
    """Everything that `/metrics` shows. Used on the event loop only."""

    def __init__(self, model_name: str = "", *, has_vllm_names: bool = False) -> None:
        """has_vllm_names: the metrics are shown under vLLM's names in addition."""
        super().__init__()
        self.gaps = Gaps(self.itl, time.monotonic())
        self.outcomes: Counter[str] = Counter()
        self.predictions = Predictions()
        self._responses: Counter[HttpResponses] = Counter()
        self.model: ModelInfo | None = None
        self._model_name = model_name
        self._has_vllm_names = has_vllm_names
        self._step_time = {kind: Histogram(STEP_SECONDS) for kind in StepClass}
        self._times: dict[RequestId, RequestTimes] = {}
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self.generated_tokens = 0
        self.prefill_tokens = 0  # of prompts, that steps have computed
        self._totals = {kind: Totals() for kind in StepClass}
        self._stats = _NO_STATS
        self._earlier = _NO_STATS  # its counters are those of the engines that have ended
        self._has_stats = False
        self._recent = RecentSteps()
        self._client: EngineClient | None = None
        self._histograms = self._own_histograms()
        if has_vllm_names:
            self._histograms += histograms_renamed(self._histograms, model_name)
        self._renderer = Renderer()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        # The engine process. Before it starts there is none, and no process is called "none".
        ProcessCollector(
            "penstock_engine",
            lambda: (self._client and self._client.process.pid) or "none",
            registry=self._registry,
        )
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    # Recording.

    def watch(self, engine: EngineClient) -> None:
        """Asks it at each scrape for what no step reports."""
        self._client = engine
        engine.on_step(self.on_step)
        engine.on_info(self._on_info)
        engine.on_restart(self._on_restart)

    def _on_restart(self) -> None:
        """The next engine counts from 0, and nothing runs until it is ready."""
        self._earlier, self._stats, self._has_stats = self.stats, _NO_STATS, False

    def _on_info(self, model: ModelInfo) -> None:
        self.model = model

    def on_ready(self, model: ModelInfo) -> None:
        self.model = model
        self._recent.begin(time.monotonic())

    def on_submit(
        self, request_id: RequestId, num_prompt_tokens: int, arrival_s: float, n: int = 1
    ) -> RequestTimes:
        """The returned times are filled in as the answers start. Always followed by `forget`."""
        self._prompt_tokens += num_prompt_tokens
        self.prompt_lengths.observe(num_prompt_tokens)
        times = self._times[request_id] = RequestTimes(arrival_s, num_prompt_tokens, [None] * n)
        return times

    def on_response(self, handler: str, method: str, status: int) -> None:
        """handler: the route as declared, such as /v1/models/{model}, or NO_HANDLER."""
        known_method = method if method in _METHODS else "other"
        self._responses[HttpResponses(handler, known_method, status)] += 1

    def forget(self, request_id: RequestId) -> None:
        """The request has ended in any way."""
        self._times.pop(request_id, None)

    def on_step(self, report: StepReport) -> None:
        """Counts one report of the engine, before its outputs reach the streams. A report of step 0
        only confirms aborts."""
        self.gaps.advance(time.monotonic())
        self._stats, self._has_stats = report.stats, True
        for started in report.started:
            self._start(started)
        num_generated = report.outputs.num_tokens
        self.generated_tokens += num_generated
        if not report.step:
            return
        work = report.work
        kind = class_of(work)
        self._step_time[kind].observe(report.step_s)
        self.batch_size.observe(work.num_sequences)
        self.step_tokens.observe(work.num_prefill_tokens + work.num_decode_tokens)
        self.step_progress.observe(work.num_prefill_tokens + num_generated)
        self.prefill_tokens += work.num_prefill_tokens
        self._totals[kind].add(report)
        self._recent.add(report, kind)

    def _start(self, started: Started) -> None:
        if started.index == 0:  # the other answers share the blocks of the first
            self._cached_tokens += started.num_cached_tokens
        if times := self._times.get(started.request_id):
            times.started_s[started.index] = started.at_s
            self.queue_time.observe(max(0.0, started.at_s - times.arrival_s))
            if started.index == 0:
                times.predicted_ttft_s = started.predicted_ttft_s
                self.computed_lengths.observe(times.num_prompt_tokens - started.num_cached_tokens)

    # Reading.

    @property
    def stats(self) -> SchedulerStats:
        """As of the last step; counters since the first engine started."""
        return plus_counters(self._stats, self._earlier)

    @property
    def num_waiting(self) -> int:
        """Answers in the queue, including those that the engine has not received yet."""
        num_open = self._client.streams.num_open if self._client else 0
        return max(self._stats.num_waiting, num_open - self._stats.num_running)

    def recent(self) -> Totals:
        """All steps of the last seconds, whatever their class."""
        return _sum(self._recent.totals(time.monotonic()))

    def text(self) -> bytes:
        """Prometheus's text format."""
        self.gaps.count()
        histograms = "".join(family.text() for family in self._histograms)
        return (histograms + self._renderer.text(self._registry.collect())).encode()

    def families(self) -> Iterator[Metric]:
        """All of our own metrics."""
        self.gaps.count()
        yield from (family.metric() for family in self._histograms)
        yield from self.collect()

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at a scrape: all metrics except histograms."""
        if not self._has_vllm_names:
            return self._own()
        theirs = metrics_of_vllm_alone(
            self._model_name,
            self.model,
            {
                "local_compute": self.computed_lengths.sum,
                "local_cache_hit": self._cached_tokens,
            },
            self._responses,
            self.num_waiting,
        )
        return chain(with_vllm_names(self._own(), self._model_name), theirs)

    def _own(self) -> Iterator[Metric]:
        yield from self._counters()
        yield from self._restarts()
        yield from self._counters_by_class()
        if self.stats.tier is not None:
            yield from tier_metrics(self.stats.tier)
        if self.stats.drafts:
            yield from draft_metrics(self.stats.drafts)
        yield from self.predictions.metrics()
        yield from self._gauges()
        yield from self._adapters()
        yield InfoMetricFamily("penstock_build", "The running build", value=build_info())
        if self.model:
            yield from self._engine(self.model)
            yield from self._hardware(self.model)

    def _own_histograms(self) -> list[HistogramFamily]:
        step_time = HistogramFamily(
            "penstock_step_time_seconds",
            "Time of one step, by what it ran: decode, prefill, or both (mixed)",
            [({"class": kind}, histogram) for kind, histogram in self._step_time.items()],
        )
        return [*described_in(self), step_time, *described_in(self.predictions)]

    def _counters(self) -> Iterator[Metric]:
        stats, busy_s = self.stats, sum(totals.step_s for totals in self._totals.values())
        yield counter("prompt_tokens", self._prompt_tokens)
        yield counter("cached_prompt_tokens", self._cached_tokens)
        yield counter("generated_tokens", self.generated_tokens)
        for name in SCHEDULER_COUNTERS:
            yield counter(name, getattr(stats, f"{name}_total"))
        yield counter("engine_busy_seconds", busy_s)
        outcomes = {outcome: self.outcomes[outcome] for outcome in _OUTCOMES}
        yield counter("requests", outcomes, "outcome")
        by_status: Counter[str] = Counter()
        for response, count in self._responses.items():
            by_status[str(response.status)] += count
        yield counter("http_responses", by_status, "status")

    def _restarts(self) -> Iterator[Metric]:
        """The events in the life of the engine's process."""
        client = self._client
        causes = [cause for cause in EndCause if cause is not EndCause.CLOSED]
        restarts = {cause: client.restarts[cause] if client else 0 for cause in causes}
        yield counter("engine_restarts", restarts, "cause")
        yield counter("resumed_requests", client.recovery.num_resumed if client else 0)
        yield counter("quarantined_requests", client.recovery.num_quarantined if client else 0)

    def _counters_by_class(self) -> Iterator[Metric]:
        for name in ("model_bytes", "model_flops"):
            by_class = {kind: getattr(totals, name) for kind, totals in self._totals.items()}
            yield counter(name, by_class, "class")

    def _gauges(self) -> Iterator[Metric]:
        stats = self._stats
        first, *more = stats.groups
        num_blocks = self.model.num_blocks if self.model else 0
        num_free = first.num_free if self._has_stats else num_blocks
        yield gauge("running_sequences", stats.num_running)
        yield gauge("waiting_sequences", self.num_waiting)
        yield gauge("kv_used_blocks", first.num_used)
        yield gauge("kv_idle_blocks", first.num_evictable)
        yield gauge("kv_free_blocks", num_free)
        yield gauge("kv_cache_usage_ratio", stats.kv_usage)
        yield from group_metrics(more)
        if stats.fairness_index is not None:
            yield gauge("fairness_jain_index", stats.fairness_index)

    def _adapters(self) -> Iterator[Metric]:
        """Only a server with --enable-lora has these."""
        client = self._client
        if client and (max_loras := client.adapters.max_loras):
            running, waiting = client.adapters_in_use()
            yield from adapter_metrics(max_loras, running, waiting, client.adapters.num_requests)

    def _engine(self, model: ModelInfo) -> Iterator[Metric]:
        """Metrics that exist once the model is loaded."""
        yield gauge("kv_block_size_tokens", model.block_size)
        is_stepping = self._stats.num_running > 0
        idle_ratio = self._recent.idle_ratio(time.monotonic(), is_stepping=is_stepping)
        yield gauge("engine_idle_ratio", idle_ratio)
        if model.pipeline_parallel_size > 1:
            yield gauge("pipeline_bubble_ratio", self.recent().bubble_ratio)
        age_s = self._client.step_age_s if self._client else 0.0
        yield gauge("engine_last_step_age_seconds", age_s)
        yield InfoMetricFamily(
            "penstock_model",
            "The served model",
            value={
                "architecture": model.architecture,
                "dtype": model.dtype,
                "kv_cache_dtype": model.kv_cache_dtype,
                "device": model.device,
                "name": self._model_name,
            },
        )
        if self._client:
            client = self._client
            yield from gpu_way_metrics(client.info.gpu_way, client.failed_ways)
        yield from quantization_metrics(model)
        yield gauge("startup_seconds", model.load_seconds, "phase")

    def _hardware(self, model: ModelInfo) -> Iterator[Metric]:
        """The hardware's peaks, and the share of them that the last seconds' steps used."""
        recent = self._recent.totals(time.monotonic())
        by_class = {kind.value: totals for kind, totals in recent.items()} | {"all": _sum(recent)}
        yield from utilization(
            "bandwidth",
            "bytes_per_second",
            {
                "datasheet": model.peak_bandwidth_bytes_per_s,
                "measured": model.measured_bandwidth_bytes_per_s,
            },
            {kind: totals.bytes_per_s for kind, totals in by_class.items()},
        )
        if model.measured_bandwidth_bytes_per_s:
            yield gauge("measured_peaks_are_doubtful", float(model.rates_are_doubtful))
        yield from utilization(
            "flops",
            "per_second",
            {"datasheet": model.peak_flops_per_s, "measured": model.measured_flops_per_s},
            {kind: totals.flops_per_s for kind, totals in by_class.items()},
        )


def _sum(by_class: dict[StepClass, Totals]) -> Totals:
    total = Totals()
    for part in by_class.values():
        total.add(part)
    return total
