"""The metrics of what a server has besides: adapters, a tier below the KV cache, further pools of
blocks, a quantized model, a device whose peaks are known."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from prometheus_client.core import InfoMetricFamily, Metric

from penstock.engine.client import ModelInfo
from penstock.scheduler.stats import DraftStats, GroupBlocks, TierStats
from penstock.server.observability.exposition import counter, gauge
from penstock.server.observability.step_window import WINDOW_S

_STATES = ("used", "idle", "free")
_TIER_COUNTERS = {
    "hit_blocks": "Blocks that were loaded for prompts, by where they were",
    "read_bytes": "Bytes of blocks read from there",
    "read_seconds": "Time of reading them, of a disk summed over threads",
    "written_bytes": "Bytes of blocks written there",
    "write_seconds": "Time of writing them",
    "unwritten_blocks": "Blocks whose memory was used for others before they were written",
    "removed_blocks": "Blocks that this server removed to stay within the limit",
    "damaged_blocks": "Blocks that were missing, cut off or changed, and that were computed again",
    "failed_writes": "Blocks that could not be written",
}
_TIER_GAUGES = {
    "blocks": "Blocks of this model that can be read from there",
    "bytes": "Bytes that blocks take there; of a disk all files in --kv-offload-dir, when it was "
    "last looked at",
}
# The peak is that of memory.
_ABOVE_ONE = {"bandwidth": "; above 1 where a model fits in the processor's cache, which is faster"}


def adapter_metrics(
    max_loras: int, running: Set[str], waiting: Set[str], num_requests: Mapping[str, int]
) -> Iterator[Metric]:
    """running, waiting: names of adapters with such requests. num_requests: by name."""
    names = [",".join(sorted(each)) for each in (running, waiting)]
    # As in vLLM: of the series that a change of labels leaves behind, the latest counts.
    yield gauge(
        "lora_requests_info",
        "With --enable-lora, when it was so: the adapters with a request that runs, and with one "
        "that waits",
        {(str(max_loras), *names): time.time()},
        *("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    )
    yield counter(
        "lora_adapter_requests",
        "With --enable-lora: requests that named an adapter, since it was loaded",
        num_requests,
        "adapter",
    )


def draft_metrics(drafts: Sequence[DraftStats]) -> Iterator[Metric]:
    """By the source of the drafts."""
    for name, help_text, counts in (
        (
            "spec_decode_drafts",
            "Rows of steps that had drafts of the next tokens, by where these were found",
            {each.source: each.num_drafts_total for each in drafts},
        ),
        (
            "spec_decode_draft_tokens",
            "Drafts that were verified, by where they were found",
            {each.source: each.num_draft_tokens_total for each in drafts},
        ),
        (
            "spec_decode_accepted_tokens",
            "Drafts that were accepted, by where they were found",
            {each.source: each.num_accepted_tokens for each in drafts},
        ),
    ):
        yield counter(name, help_text, counts, "source")
    for name, which, by_position in (
        ("accepted", "that were accepted", [each.accepted for each in drafts]),
        ("reached", "all before which were accepted", [each.reached for each in drafts]),
    ):
        yield counter(
            f"spec_decode_{name}_tokens_per_pos",
            f"Drafts {which}, by where they were found and their position in their row",
            {
                (each.source, str(position)): count
                for each, counts in zip(drafts, by_position, strict=True)
                for position, count in enumerate(counts)
            },
            *("source", "position"),
        )


def group_metrics(groups: Sequence[GroupBlocks]) -> Iterator[Metric]:
    """The states of recurrent layers, and the blocks of layers with a sliding window, where others
    have a pool of their own."""
    windows: dict[tuple[str, str], int] = {}
    for group in groups:
        counts = zip(_STATES, (group.num_used, group.num_evictable, group.num_free), strict=True)
        if not group.is_recurrent:
            windows |= {(str(group.window), state): number for state, number in counts}
            continue
        yield gauge(
            "recurrent_states",
            "Recurrent states: used by sequences, idle as snapshots, or free",
            dict(counts),
            "state",
        )
    if windows:
        yield gauge(
            "kv_window_blocks",
            "KV blocks of the layers with a sliding window, by its tokens and their state",
            windows,
            *("window", "state"),
        )


def tier_metrics(tier: TierStats) -> Iterator[Metric]:
    """A server with --kv-offload-gb or --kv-offload-dir has these besides. Label `tier`: memory, of
    the host of a GPU, or disk."""
    yield counter(
        "kv_offload_query_tokens",
        "Prompt tokens looked up below the KV cache, as they were not in it",
        tier.query_tokens_total,
    )
    loaded = tier.hit_tokens_total
    yield counter("kv_offload_hit_tokens", "Prompt tokens loaded from there", loaded)
    reasons = ("absent", "slower", "unreadable", "late")
    yield counter(
        "kv_offload_misses",
        "Prompts of which nothing, or not all that was found, was loaded, by reason: absent, "
        "slower than computing, unreadable, or late (a load took too long, and for 30 s none "
        "begins)",
        {reason: getattr(tier, f"{reason}_total") for reason in reasons},
        "reason",
    )
    found = {"memory": tier.memory, "disk": tier.disk}
    places = {label: place for label, place in found.items() if place is not None}
    for name, help_text in _TIER_COUNTERS.items():
        field = f"{name.replace('seconds', 's')}_total"
        by_place = {label: getattr(place, field) for label, place in places.items()}
        yield counter(f"kv_offload_{name}", help_text, by_place, "tier")
    for name, help_text in _TIER_GAUGES.items():
        by_place = {label: getattr(place, f"num_{name}") for label, place in places.items()}
        yield gauge(f"kv_offload_{name}", help_text, by_place, "tier")


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
        yield gauge(
            "quantization_kl_divergence",
            "Mean KL divergence, in nats, of the quantized model from the unquantized one",
            done.kl_divergence,
        )
        yield gauge(
            "quantization_top1_agreement_ratio",
            "Share of a text's tokens after which both models find the same token likeliest",
            done.top1_agreement,
        )


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
    """The known peaks, and each rate as a ratio of each of them.

    peaks: by source, None where unknown. rates: by class.
    """
    known = {source: peak for source, peak in peaks.items() if peak}
    if not known:
        return
    yield gauge(f"peak_{resource}_{unit}", f"The hardware's peak {resource}", known, "peak")
    yield gauge(
        f"model_{resource}_utilization_ratio",
        f"Share of the hardware's peak {resource} that the steps of the last {WINDOW_S} seconds "
        f"had to use while they ran; 0 if no step ran{_ABOVE_ONE.get(resource, '')}",
        {
            (kind, source): rate / peak
            for source, peak in known.items()
            for kind, rate in rates.items()
        },
        *("class", "peak"),
    )
