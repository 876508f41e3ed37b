"""Metrics of `--kv-offload-gb` and `--kv-offload-dir`: what was found, what not and why, and what
it took."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.scheduler.stats import PlaceStats, TierStats

_COUNTERS = (
    ("hit_blocks", "hit_blocks_total", "Blocks that were loaded for prompts, by where they were"),
    ("read_bytes", "read_bytes_total", "Bytes of blocks read from there"),
    ("read_seconds", "read_s_total", "Time of reading them, of a disk summed over threads"),
    ("written_bytes", "written_bytes_total", "Bytes of blocks written there"),
    ("write_seconds", "write_s_total", "Time of writing them"),
    (
        "unwritten_blocks",
        "unwritten_blocks_total",
        "Blocks whose memory was used for others before they were written",
    ),
    (
        "removed_blocks",
        "removed_blocks_total",
        "Blocks that this server removed to stay within the limit",
    ),
    (
        "damaged_blocks",
        "damaged_blocks_total",
        "Blocks that were missing, cut off or changed, and that were computed again",
    ),
    ("failed_writes", "failed_writes_total", "Blocks that could not be written"),
)
_GAUGES = (
    ("blocks", "num_blocks", "Blocks of this model that can be read from there"),
    (
        "bytes",
        "num_bytes",
        "Bytes that blocks take there; of a disk all files in --kv-offload-dir, when it was last "
        "looked at",
    ),
)


def tier_metrics(tier: TierStats) -> Iterator[Metric]:
    """What a server with --kv-offload-gb or --kv-offload-dir has besides. Label `tier`: memory, of
    the host of a GPU, or disk."""
    for name, value, help_text in (
        (
            "query_tokens",
            tier.query_tokens_total,
            "Prompt tokens looked up below the KV cache, as they were not in it",
        ),
        ("hit_tokens", tier.hit_tokens_total, "Prompt tokens loaded from there"),
    ):
        yield CounterMetricFamily(f"penstock_kv_offload_{name}", help_text, value=value)
    misses = CounterMetricFamily(
        "penstock_kv_offload_misses",
        "Prompts of which nothing, or not all that was found, was loaded, by reason: absent, "
        "slower than computing, unreadable, or late (a load took too long, and for 30 s none "
        "begins)",
        labels=["reason"],
    )
    for reason in ("absent", "slower", "unreadable", "late"):
        misses.add_metric([reason], getattr(tier, f"{reason}_total"))
    yield misses
    found = {"memory": tier.memory, "disk": tier.disk}
    places = {label: place for label, place in found.items() if place is not None}
    for name, field, help_text in _COUNTERS:
        counter = CounterMetricFamily(f"penstock_kv_offload_{name}", help_text, labels=["tier"])
        yield _filled(counter, field, places)
    for name, field, help_text in _GAUGES:
        gauge = GaugeMetricFamily(f"penstock_kv_offload_{name}", help_text, labels=["tier"])
        yield _filled(gauge, field, places)


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily, field: str, places: dict[str, PlaceStats]
) -> Metric:
    for label, place in places.items():
        family.add_metric([label], getattr(place, field))
    return family
