"""The setting of `--metrics-alias`, apart from the metrics so that `--help` need not load them."""

from enum import StrEnum


class MetricsAlias(StrEnum):
    """The server whose metric names /metrics shows in addition to ours."""

    VLLM = "vllm"
