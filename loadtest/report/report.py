"""From the observations of each request to metrics, as text and as JSON.

    TTFT        request sent, or due in an open loop -> first token arrived
    ITL         each gap between one arrival and the next
    TPOT        (last token - first token) / (output tokens - 1), per request
    E2EL        from the same start -> last token = TTFT + TPOT * (output tokens - 1): "latency"
    client queue  request due -> sent: --max-concurrency delayed it, or this client was late
    throughput  output tokens of successful requests / duration of the replay
    goodput     successful requests that meet every stated limit / duration

An arrival is a streamed event. A server may put several tokens into one, so ITL is the gap that a
reader sees, while TPOT divides by the tokens that the server counted. Text and JSON keys are those
of `vllm bench serve`, so that results can be compared.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from statistics import fmean
from typing import Any, TypeAlias

Summary: TypeAlias = dict[str, Any]

LATENCIES = ("ttft", "tpot", "itl", "e2el")
METRIC_TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": (
        "E2EL incl. Client Queue",
        "Queue-inclusive End-to-end Latency",
    ),
}
# The rows above the latencies, and those that are left out where they have no value.
_ROWS = {
    "Successful requests:": "completed",
    "Failed requests:": "failed",
    "  of these rejected (429):": "rejected",
    "Maximum request concurrency:": "max_concurrency",
    "Request rate configured (RPS):": "request_rate",
    "Benchmark duration (s):": "duration",
    "Total input tokens:": "total_input_tokens",
    "Total generated tokens:": "total_output_tokens",
    "Request throughput (req/s):": "request_throughput",
    "Request goodput (req/s):": "request_goodput",
    "Share of good requests:": "goodput_ratio",
    "Output token throughput (tok/s):": "output_throughput",
    "Peak output token throughput (tok/s):": "max_output_tokens_per_s",
    "Peak concurrent requests:": "max_concurrent_requests",
    "Total token throughput (tok/s):": "total_token_throughput",
}
_OPTIONAL = {"rejected", "max_concurrency", "request_rate", "request_goodput", "goodput_ratio"}
MAX_REASONS = 5  # different failures that are listed
# Below it, the server found little more than what templates put before every prompt.
NOTABLE_CACHED_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """The settings of a report, with vLLM's names. goodput_ms: the limit of each metric."""

    metrics: tuple[str, ...] = LATENCIES
    percentiles: tuple[float, ...] = (90.0, 95.0, 99.0)
    goodput_ms: dict[str, float] | None = None


@dataclass(slots=True, kw_only=True)
class RequestResult:
    """The observations of one request. Times are in seconds on one monotonic clock.

    scheduled_s: when it was due. arrivals_s: when events with tokens arrived. error: None if the
    response is complete. status: HTTP's, 0 without a response.
    is_open_loop: it had its own arrival time, and is timed from then.
    is_counted: the number of tokens is known; otherwise it is the number of events.
    num_cached_tokens: of the prompt, as the server reports them.
    """

    index: int
    scheduled_s: float
    sent_s: float
    ended_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    arrivals_s: list[float] = field(default_factory=list)
    text: str = ""
    status: int = 0
    error: str | None = None
    is_open_loop: bool = False
    is_counted: bool = True
    num_cached_tokens: int = 0

    @property
    def start_s(self) -> float:
        """Where its latencies start."""
        return self.scheduled_s if self.is_open_loop else self.sent_s

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """None for a single token."""
        if self.num_output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]

    @property
    def latency_s(self) -> float:
        return self.arrivals_s[-1] - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """All results of one run. duration_s: first request sent -> last answer ended.

    client_cpu_share: CPU seconds of this process per second; near 1.0 the client is the bottleneck.
    """

    results: list[RequestResult]
    duration_s: float
    client_cpu_share: float
    is_interrupted: bool = False

    @property
    def completed(self) -> list[RequestResult]:
        return [result for result in self.results if result.error is None]

    @property
    def failed(self) -> list[RequestResult]:
        return [result for result in self.results if result.error is not None]

    @property
    def max_send_delay_s(self) -> float:
        """The longest delay from due to sent: the client's fault, unless concurrency is capped."""
        return max((result.sent_s - result.scheduled_s for result in self.results), default=0.0)


def percentile(values: list[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's default. `values` must be sorted."""
    position = (len(values) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (position - below)


def summarize(replay: Replay, config: ReportConfig) -> Summary:
    """The metrics under vLLM's JSON keys; a metric without values is None."""
    done, duration = replay.completed, replay.duration_s
    num_input = sum(result.num_prompt_tokens for result in done)
    num_output = sum(result.num_output_tokens for result in done)
    summary: Summary = {
        "duration": duration,
        "completed": len(done),
        "failed": len(replay.failed),
        "is_interrupted": replay.is_interrupted,
        "rejected": sum(result.status == 429 for result in replay.failed),
        "failure_reasons": dict(_reasons(replay).most_common(MAX_REASONS)),
        "uncounted": sum(not result.is_counted for result in done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "total_cached_input_tokens": sum(result.num_cached_tokens for result in done),
        "request_throughput": len(done) / duration,
        "request_goodput": None,
        "goodput_ratio": None,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_output_tokens_per_s": max(_peak_tokens_per_s(done), num_output / duration),
        "max_concurrent_requests": max(concurrency(replay.results)[1]),
        "max_send_delay_ms": replay.max_send_delay_s * 1000,
        "client_cpu_share": replay.client_cpu_share,
    }
    if config.goodput_ms is not None:
        limits = config.goodput_ms
        num_good = sum(is_good(result, limits) for result in done)
        summary["request_goodput"] = num_good / duration
        summary["goodput_ratio"] = num_good / max(1, len(replay.results))
    for metric, seconds in metric_values(done).items():
        for name, value in _statistics(seconds, config.percentiles).items():
            summary[f"{name}_{metric}_ms"] = None if value is None else value * 1000
    return summary


def readable_date(date: str) -> str:
    """20261122-040133, as vLLM writes it, is 22 November 2026, 04:01."""
    try:
        at = datetime.strptime(date, "%Y%m%d-%H%M%S")
    except ValueError:
        return date
    return f"{at.day} {at:%B %Y, %H:%M}"


def metric_values(done: list[RequestResult]) -> dict[str, list[float]]:
    """All values of each metric of complete responses, in seconds."""
    return {
        "ttft": [result.ttft_s for result in done],
        "tpot": [tpot for result in done if (tpot := result.tpot_s) is not None],
        "itl": [gap for result in done for gap in result.itls_s],
        "e2el": [result.latency_s for result in done],
        "client_queue_time": [result.sent_s - result.scheduled_s for result in done],
        "e2el_including_client_queue": [
            result.arrivals_s[-1] - result.scheduled_s for result in done
        ],
    }


def details(replay: Replay) -> Summary:
    """Per request, in the workload's order: the fields that --save-detailed adds."""
    results = sorted(replay.results, key=lambda result: result.index)
    return {
        "input_lens": [result.num_prompt_tokens for result in results],
        "output_lens": [result.num_output_tokens for result in results],
        "ttfts": [result.ttft_s if result.arrivals_s else None for result in results],
        "itls": [result.itls_s for result in results],
        "generated_texts": [result.text for result in results],
        "errors": [result.error or "" for result in results],
        "start_times": [result.start_s for result in results],
        "latencies": [result.latency_s if result.arrivals_s else None for result in results],
        "queue_times": [result.sent_s - result.scheduled_s for result in results],
    }


def render(summary: Summary, config: ReportConfig) -> str:
    """The layout of `vllm bench serve`; our own rows appear only where they have a value.

    Beside a figure that has an entry in `error_bars`, which those of a simulation have, stands from
    where to where it may be.
    """
    bars: dict[str, tuple[float, float]] = summary.get("error_bars") or {}
    shown = summary | {"max_concurrent_requests": float(summary["max_concurrent_requests"])}
    lines = [f"{' Serving Benchmark Result ':=^50}"]
    for label, key in _ROWS.items():
        # A number of none, and what was not given, as a rate of "inf", is no row.
        value = shown.get(key)
        if key not in _OPTIONAL or isinstance(value, float) or (value and value != "inf"):
            lines.append(_row(label, value, bars.get(key)))
    for metric in config.metrics:
        short, title = METRIC_TITLES[metric]
        lines.append(f"{title:-^50}")
        for name in ("mean", "median", *map(_percentile_name, config.percentiles)):
            key = f"{name}_{metric}_ms"
            value = "-" if summary[key] is None else summary[key]
            lines.append(_row(f"{name.capitalize()} {short} (ms):", value, bars.get(key)))
    return "\n".join([*lines, "=" * 50])


def report_warnings(replay: Replay, *, has_due_times: bool, cache_advice: str) -> list[str]:
    """Why the report may be misleading: failures, and the client's own limits.

    has_due_times: whether requests had arrival times that nothing was allowed to delay.
    cache_advice: what prompts in the server's prefix cache mean for this workload.
    """
    counts = _reasons(replay)
    lines = [f"{count} x {error}" for error, count in counts.most_common(MAX_REASONS)]
    if len(counts) > MAX_REASONS:
        lines.append(f"... and {len(counts) - MAX_REASONS} other kinds of failure")
    if num_uncounted := sum(not result.is_counted for result in replay.completed):
        lines.append(
            f"the server sent no token count for {num_uncounted} responses, so their events are "
            "counted; give --tokenizer to count tokens"
        )
    if (cached := _cached_share(replay)) > NOTABLE_CACHED_SHARE:
        lines.append(
            f"{cached:.0%} of the prompt tokens were in the server's prefix cache: {cache_advice}"
        )
    if replay.client_cpu_share > 0.8:
        lines.append(
            f"this client was busy {replay.client_cpu_share:.0%} of the time: the server may be "
            "faster than these numbers"
        )
    # 50 ms are short for a person, but they are not the server's.
    if replay.max_send_delay_s > 0.05 and has_due_times:
        lines.append(
            f"this client sent a request {replay.max_send_delay_s * 1000:.0f} ms later than it was "
            "due; latencies count from when it was due"
        )
    return lines


def _cached_share(replay: Replay) -> float:
    """Returns the share of the prompt tokens of complete responses that the server had cached."""
    done = replay.completed
    num_cached = sum(result.num_cached_tokens for result in done)
    return num_cached / max(1, sum(result.num_prompt_tokens for result in done))


def _reasons(replay: Replay) -> Counter[str]:
    return Counter(str(result.error) for result in replay.failed)


def _row(label: str, value: Any, bar: tuple[float, float] | None = None) -> str:
    shown = f"{value:<10.2f}" if isinstance(value, float) else f"{value:<10}"
    return f"{label:<40} {shown}" + (f" ({bar[0]:.2f} to {bar[1]:.2f})" if bar else "")


def _percentile_name(percent: float) -> str:
    return f"p{percent:g}"


def _statistics(values: list[float], percentiles: tuple[float, ...]) -> dict[str, float | None]:
    names = ["mean", "median", "std", *map(_percentile_name, percentiles)]
    if not values:
        return dict.fromkeys(names)
    ordered = sorted(values)
    mean = fmean(ordered)
    std = math.sqrt(fmean((value - mean) ** 2 for value in ordered))
    figures = [mean, percentile(ordered, 50), std, *(percentile(ordered, p) for p in percentiles)]
    return dict(zip(names, figures, strict=True))


def is_good(result: RequestResult, limits_ms: dict[str, float]) -> bool:
    """Whether the response is complete and meets every limit."""
    return result.error is None and all(
        seconds_of(result, metric) * 1000 <= limit for metric, limit in limits_ms.items()
    )


def seconds_of(result: RequestResult, metric: str) -> float:
    """A metric that goodput may limit; infinite for a request that failed."""
    if result.error is not None:
        return math.inf
    match metric:
        case "ttft":
            return result.ttft_s
        case "tpot":
            return result.tpot_s or 0.0
        case _:
            return result.latency_s


def _peak_tokens_per_s(results: list[RequestResult]) -> float:
    """The highest second since the first request; tokens are spread evenly over events."""
    tokens: defaultdict[int, float] = defaultdict(float)
    start_s = min((result.sent_s for result in results), default=0.0)
    for result in results:
        weight = result.num_output_tokens / len(result.arrivals_s)
        for arrival_s in result.arrivals_s:
            tokens[int(arrival_s - start_s)] += weight
    return max(tokens.values(), default=0.0)


def concurrency(
    results: list[RequestResult], start_s: float = 0.0
) -> tuple[list[float], list[int]]:
    """When requests were sent or ended, counted from start_s, and how many were in flight after so
    many of these changes: from 0 before the first."""
    changes = [(result.sent_s - start_s, 1) for result in results]
    changes += [(result.ended_s - start_s, -1) for result in results]
    changes.sort()
    times_s = [at_s for at_s, _ in changes]
    return times_s, list(accumulate((change for _, change in changes), initial=0))
