"""Metrics of `--kv-offload-dir`: what was found there, what not and why, and what it took."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.scheduler.stats import TierStats


def tier_metrics(tier: TierStats) -> Iterator[Metric]:
    """What a server with a directory for blocks has besides."""
    for name, value, help_text in (
        (
            "query_tokens",
            tier.query_tokens_total,
            "Prompt tokens looked up in --kv-offload-dir, as they were not in memory",
        ),
        ("hit_tokens", tier.hit_tokens_total, "Prompt tokens read from --kv-offload-dir"),
        ("read_bytes", tier.read_bytes_total, "Bytes of blocks read from --kv-offload-dir"),
        ("read_seconds", tier.read_s_total, "Time of reading them, summed over threads"),
        ("written_bytes", tier.written_bytes_total, "Bytes of blocks written to --kv-offload-dir"),
        ("write_seconds", tier.write_s_total, "Time of writing them"),
        (
            "unwritten_blocks",
            tier.unwritten_blocks_total,
            "Blocks whose memory was used for others before they were written",
        ),
        (
            "removed_blocks",
            tier.removed_blocks_total,
            "Blocks that this server removed to stay within --kv-offload-gb",
        ),
        (
            "damaged_blocks",
            tier.damaged_blocks_total,
            "Blocks whose file was missing, cut off or changed, and that were computed again",
        ),
        ("failed_writes", tier.failed_writes_total, "Blocks that could not be written"),
    ):
        yield CounterMetricFamily(f"penstock_kv_offload_{name}", help_text, value=value)
    misses = CounterMetricFamily(
        "penstock_kv_offload_misses",
        "Prompts of which nothing, or not all that was found, was read, by reason: absent, slower "
        "than computing, unreadable, or late (a read took too long, and for 30 s none begins)",
        labels=["reason"],
    )
    for reason in ("absent", "slower", "unreadable", "late"):
        misses.add_metric([reason], getattr(tier, f"{reason}_total"))
    yield misses
    yield GaugeMetricFamily(
        "penstock_kv_offload_blocks",
        "Blocks of this model that can be read from --kv-offload-dir",
        value=tier.num_blocks,
    )
    yield GaugeMetricFamily(
        "penstock_kv_offload_bytes",
        "Bytes of all files in --kv-offload-dir, when it was last looked at",
        value=tier.num_bytes,
    )
