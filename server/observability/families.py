"""The metrics of what a server has besides: adapters, a tier below the KV cache, further pools of
blocks, a quantized model, a device whose peaks are known."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from prometheus_client.core import InfoMetricFamily, Metric

from penstock.engine.client import ModelInfo
from penstock.scheduler.stats import DraftStats, GroupBlocks, TierStats
from penstock.server.observability.exposition import counter, gauge
from penstock.server.observability.metric_help import TIER_COUNTERS, TIER_GAUGES

_STATES = ("used", "idle", "free")


def adapter_metrics(
    max_loras: int, running: Set[str], waiting: Set[str], num_requests: Mapping[str, int]
) -> Iterator[Metric]:
    """running, waiting: names of adapters with such requests. num_requests: by name."""
    names = [",".join(sorted(each)) for each in (running, waiting)]
    # As in vLLM: of the series that a change of labels leaves behind, the latest counts.
    info = {(str(max_loras), *names): time.time()}
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    yield gauge("lora_requests_info", info, *labels)
    yield counter("lora_adapter_requests", num_requests, "adapter")


def draft_metrics(drafts: Sequence[DraftStats]) -> Iterator[Metric]:
    """By the source of the drafts."""
    for name, counts in (
        ("drafts", {each.source: each.num_drafts_total for each in drafts}),
        ("draft_tokens", {each.source: each.num_draft_tokens_total for each in drafts}),
        ("accepted_tokens", {each.source: each.num_accepted_tokens for each in drafts}),
    ):
        yield counter(f"spec_decode_{name}", counts, "source")
    for name in ("accepted", "reached"):
        by_position = {
            (each.source, str(position)): count
            for each in drafts
            for position, count in enumerate(getattr(each, name))
        }
        yield counter(f"spec_decode_{name}_tokens_per_pos", by_position, "source", "position")


def group_metrics(groups: Sequence[GroupBlocks]) -> Iterator[Metric]:
    """The states of recurrent layers, and the blocks of layers with a sliding window, where others
    have a pool of their own."""
    windows: dict[tuple[str, str], int] = {}
    for group in groups:
        counts = zip(_STATES, (group.num_used, group.num_evictable, group.num_free), strict=True)
        if not group.is_recurrent:
            windows |= {(str(group.window), state): number for state, number in counts}
            continue
        yield gauge("recurrent_states", dict(counts), "state")
    if windows:
        yield gauge("kv_window_blocks", windows, "window", "state")


def tier_metrics(tier: TierStats) -> Iterator[Metric]:
    """A server with --kv-offload-gb or --kv-offload-dir has these besides. Label `tier`: memory, of
    the host of a GPU, or disk."""
    yield counter("kv_offload_query_tokens", tier.query_tokens_total)
    yield counter("kv_offload_hit_tokens", tier.hit_tokens_total)
    reasons = ("absent", "slower", "unreadable", "late")
    misses = {reason: getattr(tier, f"{reason}_total") for reason in reasons}
    yield counter("kv_offload_misses", misses, "reason")
    found = {"memory": tier.memory, "disk": tier.disk}
    places = {label: place for label, place in found.items() if place is not None}
    for name in TIER_COUNTERS:
        field = f"{name.replace('seconds', 's')}_total"
        by_place = {label: getattr(place, field) for label, place in places.items()}
        yield counter(f"kv_offload_{name}", by_place, "tier")
    for name in TIER_GAUGES:
        by_place = {label: getattr(place, f"num_{name}") for label, place in places.items()}
        yield gauge(f"kv_offload_{name}", by_place, "tier")


def quantization_metrics(model: ModelInfo) -> Iterator[Metric]:
    """They tell what --quantization did, and its figures where they were measured."""
    done = model.quantization
    if done is None:
        return
    yield InfoMetricFamily(
        "penstock_quantization",
        "How --quantization rounded the weights of linear layers",
        value={
            "method": done.method,
            "bits": str(done.bits),
            "bits_per_weight": f"{done.bits_per_weight:.3f}",
            "group_size": str(done.group_size or "row"),
        },
    )
    if done.kl_divergence is not None and done.top1_agreement is not None:
        yield gauge("quantization_kl_divergence", done.kl_divergence)
        yield gauge("quantization_top1_agreement_ratio", done.top1_agreement)


def gpu_way_metrics(way: str | None, failed: Iterable[str]) -> Iterator[Metric]:
    """Only a server that computes on a GPU has them."""
    if way is not None:
        yield InfoMetricFamily(
            "penstock_gpu_way",
            "How the GPU computes, as of --gpu-way, and faster ways that have failed on it",
            value={"way": way, "failed": ",".join(failed)},
        )


def utilization(
    resource: str, unit: str, peaks: dict[str, float | None], rates: dict[str, float]
) -> Iterator[Metric]:
    """The known peaks, and each rate as a ratio of each of them. peaks: by source, None where
    unknown. rates: by class."""
    known = {source: peak for source, peak in peaks.items() if peak}
    if not known:
        return
    yield gauge(f"peak_{resource}_{unit}", known, "peak")
    ratios = {
        (kind, source): rate / peak
        for source, peak in known.items()
        for kind, rate in rates.items()
    }
    yield gauge(f"model_{resource}_utilization_ratio", ratios, "class", "peak")
