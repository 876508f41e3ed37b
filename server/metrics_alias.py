"""Our metrics a second time, under the names and labels of another server.

Dashboards, autoscalers and gateways that were made for it then work with Penstock. Each sample is
one of ours with another name: nothing is measured twice, and buckets are ours.
"""

from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from server.config import MetricsAlias

# Ours -> vLLM's (0.33), without the prefixes and without a counter's _total.
_VLLM_NAMES = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "request_latency_seconds": "e2e_request_latency_seconds",
    "queue_time_seconds": "request_queue_time_seconds",
    "prefill_time_seconds": "request_prefill_time_seconds",
    "decode_time_seconds": "request_decode_time_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generated_tokens": "request_generation_tokens",
    "step_tokens": "iteration_tokens_total",
    "running_sequences": "num_requests_running",
    "waiting_sequences": "num_requests_waiting",
    "prompt_tokens": "prompt_tokens",
    "cached_prompt_tokens": "prompt_tokens_cached",
    "generated_tokens": "generation_tokens",
    "preemptions": "num_preemptions",
    "prefix_query_tokens": "prefix_cache_queries",
    "prefix_hit_tokens": "prefix_cache_hits",
    "requests": "request_success",
}
_VLLM_LABELS = {"outcome": "finished_reason"}
_VLLM_VALUES = {"abandoned": "abort", "failed": "error"}  # of finished_reason
_KV_BLOCKS = ("penstock_kv_used_blocks", "penstock_kv_idle_blocks", "penstock_kv_free_blocks")


def with_alias(metrics: Iterable[Metric], alias: MetricsAlias, model_name: str) -> Iterator[Metric]:
    """All of ours, and behind them those that the other server has too."""
    assert alias is MetricsAlias.VLLM, alias
    own = list(metrics)
    yield from own
    labels = {"model_name": model_name, "engine": "0"}
    for metric in own:
        if name := _VLLM_NAMES.get(metric.name.removeprefix("penstock_")):
            yield _renamed(metric, f"vllm:{name}", labels)
    yield _kv_cache_usage(own, labels)


def _renamed(metric: Metric, name: str, labels: dict[str, str]) -> Metric:
    copy = Metric(name, f"{metric.documentation} ({metric.name})", metric.type)
    copy.samples = [
        Sample(
            name + sample.name.removeprefix(metric.name),
            labels
            | {
                _VLLM_LABELS.get(key, key): _VLLM_VALUES.get(value, value)
                for key, value in sample.labels.items()
            },
            sample.value,
        )
        for sample in metric.samples
    ]
    return copy


def _kv_cache_usage(own: list[Metric], labels: dict[str, str]) -> Metric:
    """From 0 to 1, in spite of its name."""
    blocks = {metric.name: metric.samples[0].value for metric in own if metric.name in _KV_BLOCKS}
    num_blocks = sum(blocks.values())
    family = GaugeMetricFamily(
        "vllm:kv_cache_usage_perc",
        "Share of the KV blocks that sequences hold (penstock_kv_used_blocks of all)",
        labels=tuple(labels),
    )
    used = blocks["penstock_kv_used_blocks"] / num_blocks if num_blocks else 0.0
    family.add_metric(tuple(labels.values()), used)
    return family
