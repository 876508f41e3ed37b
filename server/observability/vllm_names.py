"""Our metrics under vLLM's names and labels, in addition to our own.

Dashboards, autoscalers and gateways made for vLLM then work with Penstock. Each sample is one of
ours under another name, or a sum of ours: nothing is measured twice, and the buckets are ours.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.samples import Sample

from penstock.engine.client import ModelInfo
from penstock.server.observability.exposition import HistogramFamily, counter, gauge

# Ours -> vLLM's (0.33), without the prefixes and without a counter's _total.
_VLLM_NAMES = {
    # From 0 to 1, although vLLM's name says percent.
    "kv_cache_usage_ratio": "kv_cache_usage_perc",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "request_latency_seconds": "e2e_request_latency_seconds",
    "queue_time_seconds": "request_queue_time_seconds",
    "prefill_time_seconds": "request_prefill_time_seconds",
    "decode_time_seconds": "request_decode_time_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generated_tokens": "request_generation_tokens",
    "inference_time_seconds": "request_inference_time_seconds",
    "request_computed_prompt_tokens": "request_prefill_kv_computed_tokens",
    "request_answers": "request_params_n",
    "request_max_tokens": "request_params_max_tokens",
    "step_progress_tokens": "iteration_tokens_total",
    "request_preemptions": "request_num_preemptions",
    "running_sequences": "num_requests_running",
    "waiting_sequences": "num_requests_waiting",
    "prompt_tokens": "prompt_tokens",
    "cached_prompt_tokens": "prompt_tokens_cached",
    "generated_tokens": "generation_tokens",
    "preemptions": "num_preemptions",
    "prefix_query_tokens": "prefix_cache_queries",
    "prefix_hit_tokens": "prefix_cache_hits",
    "encoder_queries": "mm_cache_queries",
    "encoder_hits": "mm_cache_hits",
    "requests": "request_success",
    "lora_requests_info": "lora_requests_info",
    "spec_decode_drafts": "spec_decode_num_drafts",
    "spec_decode_draft_tokens": "spec_decode_num_draft_tokens",
    "spec_decode_accepted_tokens": "spec_decode_num_accepted_tokens",
    "spec_decode_accepted_tokens_per_pos": "spec_decode_num_accepted_tokens_per_pos",
}
_VLLM_LABELS = {"outcome": "finished_reason"}
_VLLM_VALUES = {"abandoned": "abort", "failed": "error"}  # of finished_reason
# Requested by monitoring and not by clients; vLLM does not count these routes either.
_NOT_COUNTED = frozenset({"/metrics", "/health", "/ping", "/ready", "/version", "/steps"})


class HttpResponses(NamedTuple):
    """A kind of response that is counted. handler: the route as declared."""

    handler: str
    method: str
    status: int


def histograms_renamed(own: Iterable[HistogramFamily], model_name: str) -> list[HistogramFamily]:
    """Those of our histograms that vLLM has too, under its names."""
    labels = _labels(model_name)
    return [
        HistogramFamily(
            f"vllm:{name}",
            f"{family.help_text} ({family.name})",
            [(labels | own_labels, histogram) for own_labels, histogram in family.members],
        )
        for family in own
        if (name := _VLLM_NAMES.get(family.name.removeprefix("penstock_")))
    ]


def with_vllm_names(metrics: Iterable[Metric], model_name: str) -> Iterator[Metric]:
    """All of our metrics, followed by those that vLLM has too, under its names."""
    own = list(metrics)
    yield from own
    labels = _labels(model_name)
    for metric in own:
        if name := _VLLM_NAMES.get(metric.name.removeprefix("penstock_")):
            yield _renamed(metric, f"vllm:{name}", labels)


def metrics_of_vllm_alone(
    model_name: str,
    model: ModelInfo | None,
    prompt_tokens: Mapping[str, float],
    responses: Mapping[HttpResponses, int],
    num_waiting: int,
) -> Iterator[Metric]:
    """vLLM's metrics whose labels differ from ours. prompt_tokens: by source."""
    labels = _labels(model_name)
    own = tuple(labels.values())
    yield counter(
        "prompt_tokens_by_source",
        {(*own, source): num for source, num in prompt_tokens.items()},
        *(*labels, "source"),
        prefix="vllm:",
        help_text="Tokens of prompts that have had their first step, by source: computed or cached",
    )
    yield gauge(
        "num_requests_waiting_by_reason",
        {(*own, "capacity"): num_waiting, (*own, "deferred"): 0},
        *(*labels, "reason"),
        prefix="vllm:",
        help_text="Sequences that wait in the queue, by reason: capacity, since nothing defers "
        "them here",
    )
    yield _http_requests(responses)
    if model:
        sizes = {"block_size": str(model.block_size), "num_gpu_blocks": str(model.num_blocks)}
        yield InfoMetricFamily("vllm:cache_config", "The KV cache", value=labels | sizes)


def _http_requests(responses: Mapping[HttpResponses, int]) -> Metric:
    """The counter of prometheus-fastapi-instrumentator, which vLLM uses."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for response, count in responses.items():
        if response.handler not in _NOT_COUNTED:
            status = f"{response.status // 100}xx"
            counts[response.handler, response.method, status] += count
    labels = ("handler", "method", "status")
    text = "HTTP responses by route"
    return counter("http_requests", counts, *labels, prefix="", help_text=text)


def _labels(model_name: str) -> dict[str, str]:
    return {"model_name": model_name, "engine": "0"}


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
